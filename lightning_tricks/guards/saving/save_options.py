"""SafeCheckpoint's options, refused in one line where they make no sense."""

from typing import Any

from lightning_tricks._errors import UsageError


def check_folder(saver: Any, trainer: Any) -> None:
    """Refuse a bucket, and the folder of another SafeCheckpoint of the Trainer.

    Raises:
        UsageError: `dirpath` is one of these.
    """
    if "://" in str(saver.dirpath):
        raise UsageError(
            f"SafeCheckpoint: dirpath={saver.dirpath}: give a folder of this machine's file systems, because a bucket "
            "cannot rename at once; ModelCheckpoint writes to buckets"
        )
    for other in trainer.checkpoint_callbacks:
        if other is not saver and isinstance(other, type(saver)) and other.dirpath == saver.dirpath:
            raise UsageError(
                f"SafeCheckpoint: dirpath={saver.dirpath}: two of them share this folder and would delete each "
                "other's checkpoints: give one of them another dirpath"
            )


def check_options(saver: Any) -> None:
    """Refuse options out of their range.

    Raises:
        UsageError: the first such option.
    """
    for name, least, words in (
        ("every_n_train_steps", 1, (None,)),
        ("permanent_steps", 1, (None, "powers_of_two")),
        ("keep_last", 1, ()),
        ("keep_best", 0, ()),
    ):
        value = getattr(saver, name)
        if value not in words and (not isinstance(value, int) or value < least):
            raise UsageError(f"SafeCheckpoint: {name}={value!r}: give a whole number of at least {least}")
    if saver.every_n_minutes is not None and not saver.every_n_minutes > 0:
        raise UsageError(f"SafeCheckpoint: every_n_minutes={saver.every_n_minutes!r}: give a number above 0")
    if saver.mode not in ("min", "max"):
        raise UsageError(f"SafeCheckpoint: mode={saver.mode!r}: give 'min' or 'max'")
