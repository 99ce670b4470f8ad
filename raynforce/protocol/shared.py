"""Observations in memory that both sides have: the host writes them in place, messages carry the rest."""

from __future__ import annotations

import mmap
import os

import numpy as np

from raynforce.protocol.spaces import DTYPES, Spaces, row_bytes

_LINE = 64  # bytes that each array begins at a multiple of


class SharedObs:
    """One array `[envs, ...]` for each leaf, then one for each leaf's last observation of an episode.

    The memory has no name: it is passed over a Unix socket as `fd`, and freed with its last user.
    """

    def __init__(self, spaces: Spaces, envs: int, final: bool = True) -> None:
        leaves = [*spaces.obs, *(spaces.obs if final else ())]
        sizes = [-(-envs * row_bytes(leaf) // _LINE) * _LINE for leaf in leaves]
        self.fd = os.memfd_create("raynforce-observations")
        try:
            os.posix_fallocate(self.fd, 0, max(1, sum(sizes)))  # memory that is not there is told now, not by a signal
            self._memory = mmap.mmap(self.fd, max(1, sum(sizes)))
        except OSError:
            os.close(self.fd)
            raise
        offsets = [sum(sizes[:i]) for i in range(len(sizes))]
        columns = [
            np.ndarray((envs, *leaf.shape), DTYPES[leaf.dtype], self._memory, offset)
            for leaf, offset in zip(leaves, offsets, strict=True)
        ]
        paths = [leaf.path for leaf in spaces.obs]
        self.obs = dict(zip(paths, columns, strict=False))
        self.final = dict(zip(paths, columns[len(paths) :], strict=False))

    def close(self) -> None:
        """The arrays stay as long as they are used."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
