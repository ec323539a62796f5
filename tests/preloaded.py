"""Old name of a part of `harness`."""

from harness.preloaded import left_over, python  # noqa: F401
