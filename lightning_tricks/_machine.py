"""What this host can hold at most: bounds by which a slip of the finger is told from a large run."""

import os


def host_bytes() -> int:
    """Memory of this host."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def most_processes() -> int:
    """Number of processes of one kind that this host can be asked for: eight a core, and 64 at least, for tests."""
    return max(64, 8 * (os.cpu_count() or 1))
