"""Old name of a part of `harness`."""

from harness.runs import Fail  # noqa: F401
