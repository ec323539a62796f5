"""Write a file and know the checksum of what was written, without reading it again."""

import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any


class ChecksummedFile:
    """A file that `torch.save` writes to: keeps the CRC-32 of all it gets, and the error that torch would swallow."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.checksum = file, 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        """Write all of it."""
        self.checksum = zlib.crc32(data, self.checksum)
        try:
            return self.file.write(data)
        except OSError as error:
            self.error = error
            raise

    def tell(self) -> int:
        """Bytes written so far."""
        return self.file.tell()

    def flush(self) -> None:
        """Give what is held back to the operating system."""
        self.file.flush()

    def close(self) -> None:
        """Nothing: `open_checksummed` closes it."""


@contextmanager
def open_checksummed(file: Path) -> Iterator[ChecksummedFile]:
    """Open a new file for writing; at the end of the `with` the disk has all of it.

    Raises:
        OSError: what the file system says, such as a full disk.
    """
    with file.open("wb") as opened:
        stream = ChecksummedFile(opened)
        try:
            yield stream
        except RuntimeError as error:
            raise stream.error or error from None
        opened.flush()
        os.fsync(opened.fileno())
