"""`autopsy`: the documents of one optimizer step's batch by their loss. Read `documents` first, then `autopsy`."""

from pathlib import Path
from typing import Any

from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.quote import say
from lightning_tricks._host.writable import check_file


def run(
    model: Any,
    datamodule: Any,
    trainer: Any,
    *,
    step: int,
    ckpt_path: str | None = None,
    top: int = 5,
    json: str | None = None,
    weights_only: bool | None = None,
) -> None:
    """List the documents of one optimizer step's batch by their loss, the highest first.

    Args:
        model: of the recipe.
        datamodule: of the recipe.
        trainer: of one process, with the recipe's length.
        step: the optimizer step, as the logs and StepGuard count: the first is step 0.
        ckpt_path: the weights to use, a checkpoint or last; the step began with those of a checkpoint of this step.
        top: documents to print.
        json: file for all documents.
        weights_only: as in torch.load.
    """
    from lightning_tricks.commands.autopsy.autopsy import autopsy

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
        device=trainer.strategy.root_device,
        max_steps=trainer.max_steps,
        weights_only=weights_only,
    )
    say(*report.table(top).split("\n"))
    if json is not None:
        report.write(Path(json))
