"""DeepSpeed's checkpoint folders: written so that a kill leaves the older one, and made one plain file.

DeepSpeed's engine writes in place. So it is asked for its states by a checkpoint engine that writes nothing, and no
rank fails, or waits for one that did, while the engine communicates; then all ranks write, and agree on the outcome.
"""

import contextlib
import io
import shutil
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.replaced import replaced
from lightning_tricks.checkpoints.check_checkpoint import check_bytes
from lightning_tricks.checkpoints.record import checksum_of
from lightning_tricks.checkpoints.write_file import fsync_path, open_checksummed, write_file

__all__ = ["consolidate_deepspeed"]

INSTALL = "pip install setuptools wheel && DS_BUILD_OPS=0 pip install --no-build-isolation 'deepspeed>=0.19.8'"
TAG = "checkpoint"  # the subfolder that Lightning has DeepSpeed write to
_NOWHERE = "unwritten"  # the folder that the engine is given, and that nobody makes
# The entries that DeepSpeed adds, and Lightning's state of a run; the other entries are the module's own.
_DEEPSPEED_KEYS = [
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments",
    "shared_params", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names", "skipped_steps",
    "global_steps", "global_samples", "dp_world_size", "mp_world_size", "num_experts", "ds_config", "ds_version",
    "autoep_layers", "parallel_dims",
]  # fmt: skip
_LIGHTNING_KEYS = ["loops", "callbacks", "lr_schedulers", "optimizer_states"]


def check_installed() -> None:
    """Refuse to go on without the package; it is not imported."""
    if "deepspeed" not in sys.modules and find_spec("deepspeed") is None:
        raise UsageError(f"strategy: DeepSpeedZeROStrategy needs deepspeed: {INSTALL}")


def load_deepspeed() -> Any:
    """The package `deepspeed`, unless it is missing or does not import here."""
    check_installed()
    try:
        import deepspeed
    except Exception as error:  # it probes compilers and devices while it is imported
        line, _, _ = str(error).strip().partition("\n")
        raise UsageError(
            f"strategy: deepspeed is installed but does not import ({line}): {INSTALL} --force-reinstall"
        ) from error
    return deepspeed


class Layout(NamedTuple):
    """The division of a checkpoint among ranks."""

    path: Path  # its folder
    world_size: int  # number of processes that wrote it
    weights_sharded: bool  # whether a run at stage 3 wrote it
    bf16: bool  # whether a run in bf16 wrote it

    def refuse_other(self, stage: int, world_size: int, precision: str) -> None:
        """Refuse to resume a run with another number of processes, another kind of stage or another precision."""
        stages, precisions = ("1 or 2", "3"), ("fp32 or fp16", "bf16")
        for what, there, here in (
            ("world size", self.world_size, world_size),
            ("stage", stages[self.weights_sharded], stages[stage == 3]),
            ("precision", precisions[self.bf16], precisions[precision.startswith("bf16")]),
        ):
            if there != here:
                raise UsageError(
                    f"the checkpoint {self.path} is of {what} {there}, this run of {here}: run as it was saved or make "
                    "one file of its weights with consolidate_deepspeed and start from those"
                )


def read_layout(folder: Any) -> Layout:
    """Read how a checkpoint is divided from the names in its folder, which is refused if it is not whole."""
    path = Path(folder)
    parts = path / TAG
    if not parts.is_dir():
        hint = "a plain file holds the weights only, for LightningModule.load_from_checkpoint" if path.is_file() else ""
        hint = hint or "give the folder that the run wrote, not one inside it"
        raise UsageError(f"{path} is no checkpoint folder of DeepSpeed: {hint}")
    names = [file.name for file in parts.glob("*_optim_states.pt")]
    weights_sharded = (parts / "zero_pp_rank_0_mp_rank_00_model_states.pt").exists()
    if not (path / "latest").exists() or not names:
        raise UsageError(f"the checkpoint {path} was not written to its end: take an earlier one")
    return Layout(path, len(names), weights_sharded, names[0].startswith("bf16_"))


def consolidate_deepspeed(folder: Any, file: Any) -> Path:
    """Write the weights of a DeepSpeed checkpoint to one file that Lightning and torch open on any device.

    The file holds the weights in fp32, under `state_dict`, and the entries that the LightningModule stored
    (hyper-parameters, its own `on_save_checkpoint`); `load_from_checkpoint` and `trainer.validate(ckpt_path=...)` take
    it. It holds no optimizer state. Needs memory for about two copies of the weights, and the package deepspeed.

    Args:
        folder: a checkpoint of `DeepSpeedZeROStrategy`, of any stage and number of processes.
        file: the file to write; it appears when it is whole.

    Returns:
        The path of the file.

    Raises:
        UsageError: the folder is no finished checkpoint, or has other bytes than were written; the file's name is that
            of a folder; deepspeed is missing.

    Source: https://github.com/deepspeedai/DeepSpeed/blob/master/deepspeed/utils/zero_to_fp32.py
    """
    layout, path = read_layout(folder), Path(file)
    if path.is_dir():
        raise UsageError(f"{path} is a folder: give the name of a file")
    check_bytes(layout.path)
    write_file(read_weights(layout), path)
    return path


def read_weights(layout: Layout) -> dict[str, Any]:
    """The checkpoint that `consolidate_deepspeed` writes, in memory."""
    load_deepspeed()
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    name = "zero_pp_rank_0_mp_rank_00_model_states.pt" if layout.weights_sharded else "mp_rank_00_model_states.pt"
    saved = torch.load(layout.path / TAG / name, map_location="cpu", weights_only=False)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        weights = get_fp32_state_dict_from_zero_checkpoint(str(layout.path), tag=TAG)
    if not layout.weights_sharded:  # at stage 1 frozen weights are only in `saved`
        weights = {**{key: _to_fp32(value) for key, value in saved["module"].items()}, **weights}
    kept = {key: value for key, value in saved.items() if key not in _DEEPSPEED_KEYS + _LIGHTNING_KEYS}
    return {**kept, "state_dict": weights}


def _to_fp32(value: Any) -> Any:
    return value.float() if torch.is_tensor(value) and value.is_floating_point() else value


def states_to_save(engine: Any, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """What this rank's engine would write, by the names of its files in the folder; every rank must call."""
    from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine

    states: dict[str, Any] = {}
    rest = {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}

    class Collect(TorchCheckpointEngine):
        """Keeps each state under the name of its file."""

        def save(self, state_dict: Any, path: str) -> None:
            states[str(Path(path).relative_to(_NOWHERE))] = state_dict

        def makedirs(self, path: str, exist_ok: bool = False) -> None:
            """Make no folder: `write_states` does."""

    no_script = replaced(engine, "_copy_recovery_script", lambda save_path: None)
    with no_script, replaced(engine, "checkpoint_engine", Collect()):
        engine.save_checkpoint(_NOWHERE, tag=TAG, client_state=rest, save_latest=False)
    return states


def write_states(states: Mapping[str, Any], folder: Path, group: Any) -> dict[str, int]:
    """Write this rank's files, `states` of `states_to_save`; see `write_folder`."""
    checksums = {}
    for name, state in states.items():
        (folder / name).parent.mkdir(exist_ok=True)
        with open_checksummed(folder / name) as file:
            torch.save(state, file)  # type: ignore[arg-type]
        checksums[name] = file.checksum
    if dist.get_rank(group) == 0:
        tools = Path(load_deepspeed().__file__).parent / "utils"
        shutil.copy(tools / "zero_to_fp32.py", folder)  # DeepSpeed's program that makes one file of the folder
        (folder / "latest").write_text(TAG)  # in which DeepSpeed looks for the name of the subfolder
        for name in ("zero_to_fp32.py", "latest"):
            fsync_path(folder / name)
            checksums[name] = checksum_of(folder / name)
    return checksums
