"""Score the model on tasks of lm_eval at validations, such as arc_easy or lambada, as `eval/TASK/METRIC`."""

import importlib.util
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from lightning_tricks._core.errors import PIP_EXTRA, UsageError
from lightning_tricks._trainer.lightning import Module, Trainer, pl
from lightning_tricks.outputs._text_model import TextModel, refuse_shared_rows

__all__ = ["LMEval"]


def harness() -> ModuleType:
    """The module `_harness_model`, which imports lm_eval.

    Raises:
        UsageError: lm_eval is not installed.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise UsageError(f"tasks are run by lm_eval: {PIP_EXTRA.format('eval')}")
    return importlib.import_module("lightning_tricks.outputs._harness_model")


class LMEval(pl.Callback):
    """Score the model on tasks of lm_eval at validations, and log `eval/TASK/METRIC`. Never changes training.

    Takes any module whose `forward(input_ids)` maps token ids (batch, length) to the logits of each next token, as a
    tensor (batch, length, vocabulary) or as an object with `logits`. The tokenizer is the attribute `tokenizer` of the
    data module or of the module, of the library `tokenizers` or `transformers`. The tasks' data are read when the run
    starts: what the network refuses is said before training. All ranks share the questions. `ModelCheckpoint` can
    monitor the metrics. Averages that stand in for the weights at validations, as EMA's do, are what is scored.

    Args:
        tasks: names of tasks and groups of lm_eval, or paths of YAML files that define one.
        include_path: folder with definitions of more tasks.
        num_fewshot: examples before each question; None: as each task says.
        limit: questions of each task, or below 1 a share of them; None: all.
        batch_size: rows in a forward pass of one process.
        every_n_validations: run the tasks at every n-th validation of a fit; `validate` runs them each time.
        max_length: tokens in the longest row; None: as the model says.

    Raises:
        UsageError: when the run starts: lm_eval or the tokenizer is missing; no such task, or its data cannot be read;
            ranks that share rows (tensor, context).

    Example:
        >>> scores = LMEval(["arc_easy", "lambada_openai"], limit=200)  # doctest: +SKIP

    Source: https://github.com/EleutherAI/lm-evaluation-harness, whose maintainers advise a callback that calls
        `simple_evaluate` (issue 1088 there).
    """

    def __init__(
        self,
        tasks: Sequence[str],
        include_path: str | None = None,
        num_fewshot: int | None = None,
        limit: float | None = None,
        batch_size: int = 8,
        every_n_validations: int = 1,
        max_length: int | None = None,
    ) -> None:
        if not tasks or isinstance(tasks, str):
            raise UsageError(f"LMEval: tasks={tasks!r}: give a list of at least one name")
        for name, value in (("batch_size", batch_size), ("every_n_validations", every_n_validations)):
            if value < 1:
                raise UsageError(f"LMEval: {name}={value}: give at least 1")
        if limit is not None and limit <= 0:
            raise UsageError(f"LMEval: limit={limit}: give a number of questions, or a share of them below 1")
        self.tasks, self.include_path, self.num_fewshot, self.limit = list(tasks), include_path, num_fewshot, limit
        self.batch_size, self.every_n_validations, self.max_length = batch_size, every_n_validations, max_length
        self._loaded: Any = None
        self._validations = 0

    def check_run(self, trainer: Any, datamodule: Any, stage: str) -> None:
        """Refuse ranks that share rows, before any process is started."""
        if stage in ("fit", "validate"):
            refuse_shared_rows(trainer, "LMEval", "eval")

    def setup(self, trainer: Trainer, pl_module: Module, stage: str) -> None:
        """Load the tasks, on the first process of each host before the others: it may download their data."""
        if stage not in ("fit", "validate"):
            return
        lm_eval_model = harness()
        if trainer.local_rank != 0:
            trainer.strategy.barrier("LMEval")
        if self._loaded is None:
            self._loaded = lm_eval_model.Tasks(self.tasks, self.include_path, self.num_fewshot)
        if trainer.local_rank == 0:
            trainer.strategy.barrier("LMEval")

    def on_fit_start(self, trainer: Trainer, pl_module: Module) -> None:
        """Refuse what the first validation would refuse."""
        harness().HarnessModel(TextModel.of_run(trainer, pl_module, "LMEval", "eval"), self.batch_size, self.max_length)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: Module) -> None:
        """Run the tasks, within the time that belongs to validation."""
        if trainer.sanity_checking:
            return
        if trainer.state.fn == "fit":
            self._validations += 1
            if self._validations % self.every_n_validations:
                return
        lm_eval_model, model = harness(), TextModel.of_run(trainer, pl_module, "LMEval", "eval")
        results = lm_eval_model.evaluate(model, self._loaded, self.batch_size, self.max_length, self.limit)
        for name, value in lm_eval_model.figures(results).items():
            pl_module.log(f"eval/{name}", value)

    def state_dict(self) -> dict[str, Any]:
        """The number of validations, for `every_n_validations` in a resumed run."""
        return {"validations": self._validations}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Count on."""
        self._validations = state_dict["validations"]
