"""Two processes run the tests, each on one thread: on the same two cores they end in half the time."""

import os

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
