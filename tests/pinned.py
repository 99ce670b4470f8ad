"""Holds this process to portable kernels, as the command line does: its runs equal those of other processes."""

from raynforce import kernels

kernels.pin()
