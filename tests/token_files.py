"""Old name of a part of `harness`."""

from harness.token_files import write_token_files  # noqa: F401
