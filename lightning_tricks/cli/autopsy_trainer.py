"""The command `autopsy` as a method of a Trainer, by which LightningCLI knows its options."""

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_tricks._errors import UsageError
from lightning_tricks._lightning import pl
from lightning_tricks._writable import check_file
from lightning_tricks.checkpoints import AtomicCheckpointIO
from lightning_tricks.commands.autopsy.autopsy import autopsy

# What a Trainer of one process needs of the recipe: the places of its checkpoints, its length and its clip.
_KEPT = ("logger", "default_root_dir", "max_steps", "gradient_clip_val", "gradient_clip_algorithm")


class AutopsyTrainer(pl.Trainer):
    """A Trainer with the method `autopsy`."""

    @classmethod
    def of_recipe(cls, settings: Mapping[str, Any]) -> "AutopsyTrainer":
        """A Trainer of one process on a CPU or GPU of this machine, whatever devices the recipe asks for.

        Args:
            settings: the Trainer's arguments in the recipe, with classes as objects.
        """
        environments = importlib.import_module(f"{pl.__name__}.plugins.environments")
        callbacks = settings.get("callbacks") or []
        callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
        return cls(
            accelerator="cpu" if settings.get("accelerator") == "cpu" else "auto",
            devices=1,
            plugins=[environments.LightningEnvironment(), AtomicCheckpointIO()],  # no job of SLURM, no torchrun
            callbacks=[callback for callback in callbacks if isinstance(callback, pl.callbacks.Checkpoint)],
            enable_progress_bar=False,
            enable_model_summary=False,
            **{name: settings[name] for name in _KEPT if settings.get(name) is not None},
        )

    def autopsy(
        self,
        model: "pl.LightningModule",
        datamodule: "pl.LightningDataModule | None" = None,
        *,
        step: int,
        ckpt_path: str | None = None,
        top: int = 5,
        json: str | None = None,
        weights_only: bool | None = None,
    ) -> None:
        """Rank the documents of one optimizer step's batch by how far each stands out.

        Args:
            model: of the recipe.
            datamodule: of the recipe.
            step: the optimizer step, as the logs and StepGuard count: the first is step 0.
            ckpt_path: the weights to use, a checkpoint or last; the step began with those of a checkpoint of this step.
            top: documents to print.
            json: file for all figures of all documents.
            weights_only: as in torch.load.
        """
        if ckpt_path is None:
            raise UsageError("ckpt_path=none: autopsy needs the checkpoint of a run, which tells the samples of a step")
        if top < 0:
            raise UsageError(f"top={top}: give the number of documents to print, 0 or more")
        if json is not None:
            check_file("json", json)
        report = autopsy(
            model,
            datamodule,
            ckpt_path,
            step,
            device=self.strategy.root_device,
            max_steps=self.max_steps,
            clip_val=self.gradient_clip_val,
            clip_algorithm=self.gradient_clip_algorithm,
            weights_only=weights_only,
        )
        print(report.table(top))
        if json is not None:
            report.write(Path(json))
