"""Speeds and memory against their targets. Ratios are taken within one run, since machines are
noisy.

A time is CPU time on one thread. The two sides of a ratio take turns, and the median of the ratios
of all turns counts; of a time without another side, the median of several repetitions.
"""

import os

# read when numpy is imported
os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")
