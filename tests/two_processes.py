"""Old name of a part of `harness`."""

from harness.processes import end, free_port, run, start, start_alone  # noqa: F401
