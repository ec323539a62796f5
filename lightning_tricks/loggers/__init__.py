"""Lightning loggers that go on in the same folder after a resume."""

from lightning_tricks.loggers.resuming_loggers import ResumingCSVLogger, ResumingTensorBoardLogger

__all__ = ["ResumingCSVLogger", "ResumingTensorBoardLogger"]
