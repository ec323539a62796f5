"""SafeCheckpoint's options, refused in one line where they make no sense."""

import os
from typing import Any

from lightning_tricks._errors import UsageError
from lightning_tricks._trainer import is_a


def check_folder(saver: Any) -> None:
    """Refuse a bucket.

    Raises:
        UsageError: `dirpath` is one.
    """
    if "://" in str(saver.dirpath):
        raise UsageError(
            f"SafeCheckpoint: dirpath={saver.dirpath}: give a folder of this machine's file systems, because a bucket "
            "cannot rename at once; ModelCheckpoint writes to buckets"
        )


def check_no_other_saver(saver: Any, trainer: Any) -> None:
    """Refuse the folder of another SafeCheckpoint or ModelCheckpoint; every one of them knows its folder by now.

    Raises:
        UsageError: another one saves there.
    """
    for other in trainer.checkpoint_callbacks:
        if other is saver or not is_a(other, "ModelCheckpoint"):
            continue
        if os.path.realpath(str(other.dirpath)) == os.path.realpath(str(saver.dirpath)):
            raise UsageError(
                f"SafeCheckpoint: dirpath={saver.dirpath}: another {type(other).__name__} saves to this folder too, "
                "and each would delete checkpoints that the other counts on: give one of them another dirpath"
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
