"""The tests of darelib, a file for each room."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # of torch, since tests run side by side
