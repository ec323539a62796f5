"""Start a run from the weights of a checkpoint: changes the weights once, before the first step of a new run."""

from pathlib import Path
from typing import Any

from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.find_modules import clean_name, names_of_others
from lightning_tricks._core.protocols import KnowsWeights
from lightning_tricks._host.address import is_address
from lightning_tricks._trainer.lightning import Module, Trainer, pl, rank_zero_info
from lightning_tricks._trainer.refusals import DDP_OR_FSDP2, NOT_OURS, Refusal
from lightning_tricks._trainer.run_facts import weights_layout
from lightning_tricks.checkpoints.hf_folder import is_hf_folder
from lightning_tricks.checkpoints.load_weights import check_source, matched, read_weights, summary

__all__ = ["InitFrom"]

_REFUSED = Refusal(NOT_OURS, f"{{strategy}} takes no weights from it: {DDP_OR_FSDP2}")


class InitFrom(pl.Callback):
    """Replaces the initial weights by those of a checkpoint, before the first step of a new run (fine-tuning).

    Everything else starts afresh: optimizer, schedule, step 0, the data from their beginning. A run that goes on from a
    checkpoint of its own (`ckpt_path`) keeps that one's weights, and a line says so: a fine-tuning that was interrupted
    goes on by the same command. Under `FSDP2Strategy` each rank reads its shards of a folder only.

    A module with a method `check_weights(checkpoint)` is asked before anything is loaded, and may raise a UsageError.

    Args:
        path: see `load_weights`, the same for a module without a Trainer.
        average: name of an average that the checkpoint holds beside its weights, to start from in their place, such as
            `ema`.

    Raises:
        UsageError: when the fit starts: see `load_weights`; a strategy that would not see the weights (DeepSpeed,
            FSDP1, Lightning's ModelParallelStrategy).
    """

    def __init__(self, path: str | Path, average: str | None = None) -> None:
        self.path, self.average = path if is_address(path) else Path(path), average

    def check(self, module: Any = None) -> None:
        """Refuse a path without weights, and a file of other weights than the module's, before any data are prepared.

        Args:
            module: one that can tell its weights before they are built, by a method `without_data`, is compared.

        Raises:
            UsageError: see `load_weights`.
        """
        try:
            source = check_source(self.path)
            # a file, or those of Hugging Face, are mapped, not read
            if (source.is_file() or is_hf_folder(source)) and isinstance(module, KnowsWeights):
                shape = module.without_data()
                checkpoint = read_weights(source, average=self.average, module=shape)
                if is_hf_folder(source) and hasattr(module, "check_weights"):
                    module.check_weights(checkpoint)
                matched(shape, checkpoint["state_dict"], self.path)
        except UsageError as error:
            raise _renamed(self.path, error) from None

    def check_run(self, trainer: Any, datamodule: Any, stage: str) -> None:
        """Refuse a strategy that has its weights elsewhere when they are loaded, before any process is started."""
        if stage == "fit":  # otherwise nothing is loaded
            _REFUSED.check(trainer.strategy, f"init_from={self.path}:")

    def setup(self, trainer: Trainer, pl_module: Module, stage: str) -> None:
        """Refuse such a strategy where no command has."""
        self.check_run(trainer, None, stage)

    def on_fit_start(self, trainer: Trainer, pl_module: Module) -> None:
        """Load the weights, unless the run goes on from a checkpoint or has trained already."""
        if trainer.ckpt_path:
            rank_zero_info(f"init_from={self.path}: not read, as the run resumes from {trainer.ckpt_path}")
        elif trainer.global_step == 0:
            try:
                rank_zero_info(f"init_from={self._load(trainer, pl_module)}")
            except UsageError as error:
                raise _renamed(self.path, error) from None

    def _load(self, trainer: Any, module: Any) -> str:
        strategy = trainer.strategy

        def read_shards(folder: Path) -> dict[str, Any]:
            optimizers, strategy.optimizers = strategy.optimizers, []  # without them it reads no state of theirs
            try:
                return strategy.load_checkpoint(folder)
            finally:
                strategy.optimizers = optimizers

        shards = weights_layout(strategy) == "shards"
        checkpoint = read_weights(self.path, read_shards if shards else None, self.average, module)
        if hasattr(module, "check_weights"):
            module.check_weights(checkpoint)
        absent, given = names_of_others(module), checkpoint["state_dict"]
        given = checkpoint["state_dict"] = {name: given[name] for name in given if clean_name(name) not in absent}
        weights = matched(module, given, self.path)
        strategy.load_model_state_dict({"state_dict": weights}, strict=False)  # the names have been compared
        return summary(module, checkpoint, self.path)


def _renamed(path: str | Path, error: UsageError) -> UsageError:
    """The error with the name of the option that the path was given to."""
    line = str(error).removeprefix("ckpt_path=").removeprefix(f"{path}: ").removeprefix(f"{path} ")
    return UsageError(f"init_from={path}: {line}")
