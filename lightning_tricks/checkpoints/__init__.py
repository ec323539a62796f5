"""Checkpoints that survive, and that move between layouts: folders of shards and single files.

`record.py` has a checkpoint's record and its checksums; `write_file.py`, `atomic_checkpoint_io.py` and `snapshot.py`
write; `check_checkpoint.py` verifies; `open_checkpoint.py` is the one entry for all that read, with `load_weights.py`
for weights alone and `hf_folder.py` for those of transformers; `find_checkpoint.py` finds the newest whole one.
`folder_metadata.py` and `_core/foreign_files.py` keep a stranger's folder from running anything, and from naming other
files.
"""

from lightning_tricks.checkpoints.atomic_checkpoint_io import AtomicCheckpointIO
from lightning_tricks.checkpoints.check_checkpoint import check_checkpoint, verify_checkpoint
from lightning_tricks.checkpoints.load_weights import load_weights
from lightning_tricks.checkpoints.open_checkpoint import open_checkpoint, size_of_folder
from lightning_tricks.checkpoints.write_file import fsync_path, swap_in

__all__ = [
    "AtomicCheckpointIO",
    "check_checkpoint",
    "fsync_path",
    "load_weights",
    "open_checkpoint",
    "size_of_folder",
    "swap_in",
    "verify_checkpoint",
]
