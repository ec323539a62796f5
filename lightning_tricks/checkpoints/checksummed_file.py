"""Files that `torch.save` writes to: with the file system's own errors, and with a checksum of what was written."""

import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any


class FileForTorch:
    """A file that `torch.save` writes to. Keeps an error of the file system, for which torch raises another one."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        """Write all of it."""
        try:
            return self.file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        """Give the buffered bytes to the operating system."""
        self.file.flush()

    @contextmanager
    def raising_its_error(self) -> Iterator[None]:
        """Raise the file system's error in the place of torch's."""
        try:
            yield
        except RuntimeError as error:
            raise self.error or error from None


class ChecksummedFile(FileForTorch):
    """Keeps the CRC-32 of all that is written, so that nothing has to be read again."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)
        self.checksum = 0

    def write(self, data: Any) -> int:
        """Write all of it."""
        self.checksum = zlib.crc32(data, self.checksum)
        return super().write(data)

    def tell(self) -> int:
        """Bytes written so far."""
        return self.file.tell()

    def close(self) -> None:
        """Do nothing: DeepSpeed and torch call it, and `open_checksummed` closes the file."""


@contextmanager
def open_checksummed(file: Path) -> Iterator[ChecksummedFile]:
    """Open a new file for writing; at the end of the `with` the disk has all of it.

    Raises:
        OSError: what the file system says, such as a full disk.
    """
    with file.open("wb") as opened:
        stream = ChecksummedFile(opened)
        with stream.raising_its_error():
            yield stream
        opened.flush()
        os.fsync(opened.fileno())
