"""Lightning loggers that go on in the same folder after a resume."""

from lightning_tricks.loggers.resuming_csv_logger import ResumingCSVLogger
from lightning_tricks.loggers.resuming_tensorboard_logger import ResumingTensorBoardLogger

__all__ = ["ResumingCSVLogger", "ResumingTensorBoardLogger"]
