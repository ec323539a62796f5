"""Old name of a part of `harness`."""

from harness.processes import Beside, processes, threads  # noqa: F401
