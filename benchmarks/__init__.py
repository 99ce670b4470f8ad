"""Speed measured side by side: every figure is a ratio of two things that took turns in the same run."""

import os

# One thread for numpy and torch, here and in child processes: their pools read this once, when they are imported.
os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"))
