"""Show text that the model writes at validations, in the log and in TensorBoard."""

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.quote import printable
from lightning_tricks._trainer.lightning import Module, Trainer, pl
from lightning_tricks._trainer.objects import is_a
from lightning_tricks._trainer.run_length import run_length
from lightning_tricks.models import Sampling
from lightning_tricks.models.generate import continue_rows
from lightning_tricks.outputs._text_model import TextModel, refuse_shared_rows

__all__ = ["SampleText"]


class SampleText(pl.Callback):
    """Print continuations of a few prompts at validations, and show them in TensorBoard. Never changes training.

    Of a fit, these are the first in each tenth of its steps but the first tenth, and one at its last step; all of them
    where its length is not known.
    Takes any module whose `forward(input_ids)` maps token ids (batch, length) to the logits of each next token, as a
    tensor (batch, length, vocabulary) or as an object with `logits`, as transformers' models do. The tokenizer is the
    attribute `tokenizer` of the data module or of the module, of the library `tokenizers` or `transformers`. Every
    validation draws with the same random numbers, so that samples differ by the weights alone.

    Cost: `max_new_tokens` forward passes of one row a prompt, on each rank.

    Args:
        prompts: texts to continue; the empty text continues from the end-of-text token, the start of a document.
        max_new_tokens: tokens to add to each prompt; a sample ends before them at an end-of-text token.
        temperature: divides the logits; 0 takes the most likely token.
        top_k: draw among the k most likely tokens only; None: among all.
        top_p: draw among the most likely tokens that together reach this probability.
        seed: of the random numbers.

    Raises:
        UsageError: when the run starts: no tokenizer; a prompt that leaves no room in the model's longest row.

    Example:
        >>> samples = SampleText(["Once"], max_new_tokens=4, temperature=0)
    """

    def __init__(
        self,
        prompts: Sequence[str] = ("",),
        max_new_tokens: int = 64,
        temperature: float = 0.8,
        top_k: int | None = None,
        top_p: float = 1.0,
        seed: int = 0,
    ) -> None:
        if not prompts or isinstance(prompts, str):
            raise UsageError(f"SampleText: prompts={prompts!r}: give a list of at least one text")
        if max_new_tokens < 1:
            raise UsageError(f"SampleText: max_new_tokens={max_new_tokens}: give at least 1")
        self.prompts, self.max_new_tokens, self.seed = list(prompts), max_new_tokens, seed
        self.sampling = Sampling(temperature, top_k, top_p)
        self._texts: list[str] = []
        self._latest = 0  # optimizer step of the latest samples
        self._total: int | None = None  # optimizer steps of the run

    def check_run(self, trainer: Any, datamodule: Any, stage: str) -> None:
        """Refuse ranks that share rows, before any process is started."""
        if stage in ("fit", "validate"):
            refuse_shared_rows(trainer, "SampleText", "generate")

    def setup(self, trainer: Trainer, pl_module: Module, stage: str) -> None:
        """Forget an earlier run; a checkpoint is loaded later."""
        self._latest, self._total = 0, None

    def state_dict(self) -> dict[str, Any]:
        """For a resumed run."""
        return {"latest": self._latest}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See `state_dict`."""
        self._latest = state_dict["latest"]

    def on_train_start(self, trainer: Trainer, pl_module: Module) -> None:
        """Find the length of the run."""
        self._total = run_length(trainer)

    on_train_epoch_start = on_train_start

    def on_fit_start(self, trainer: Trainer, pl_module: Module) -> None:
        """Refuse settings with which the first validation would fail."""
        self._model_and_prompts(trainer, pl_module)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: Module) -> None:
        """Write the samples, within the time that belongs to validation."""
        step, total, latest = trainer.global_step, self._total, self._latest
        if trainer.sanity_checking or (total and step < total and 10 * step // total <= 10 * latest // total):
            return
        self._latest = step
        model, prompts = self._model_and_prompts(trainer, pl_module)
        broken = []

        def logits_of(rows: Tensor) -> Tensor:
            logits = model.logits_of(rows)
            broken.append(logits.isnan().any())
            return logits.nan_to_num()  # drawing from NaN would end the run

        generator = torch.Generator(model.device).manual_seed(self.seed)
        new = continue_rows(logits_of, prompts, self.max_new_tokens, self.sampling, generator, model.max_length)
        ended = [ids[: ids.index(model.end)] if model.end in ids else ids for ids in new]
        self._texts = [_text_of(model, ids) for ids in ended]
        if torch.stack(broken).any():
            self._texts = [" (the model's logits are NaN)"] * len(prompts)

    def on_validation_end(self, trainer: Trainer, pl_module: Module) -> None:
        """Print them, and give them to TensorBoard."""
        texts, self._texts = self._texts, []
        if not trainer.is_global_zero:
            return
        bar: Any = trainer.progress_bar_callback
        step = f"step {trainer.global_step}  " if trainer.state.fn == "fit" else ""  # an evaluation counts no steps
        for number, (prompt, text) in enumerate(zip(self.prompts, texts, strict=False)):
            text = re.sub(r"\n\s*\n", "\n\n", f"{prompt}{text}")  # early in training, models write many blank lines
            shown = "\n".join(f"    {printable(line)}" for line in text.splitlines())
            (bar.print if bar is not None else print)(f"{step}sample {number}\n{shown}")
            loggers: list[Any] = [logger for logger in trainer.loggers if is_a(logger, "TensorBoardLogger")]
            for logger in loggers:
                logger.experiment.add_text(f"samples/{number}", shown, trainer.global_step)  # indented: verbatim

    def _model_and_prompts(self, trainer: Any, module: Any) -> tuple[TextModel, list[list[int]]]:
        """The model, and the prompts' token ids."""
        model = TextModel.of_run(trainer, module, "SampleText", "generate")
        prompts = [model.encode(prompt) or ([] if model.end is None else [model.end]) for prompt in self.prompts]
        longest = model.max_length
        for prompt, ids in zip(self.prompts, prompts, strict=True):
            if not ids:
                raise UsageError(f"SampleText: prompts: {prompt!r} holds no token and no end-of-text token is known")
            if longest is not None and len(ids) + self.max_new_tokens > longest:
                raise UsageError(
                    f"SampleText: max_new_tokens={self.max_new_tokens} after the {len(ids)} tokens of {prompt!r} is "
                    f"more than max_seq_len={longest}: give at most {max(longest - len(ids), 0)}"
                )
        return model, prompts


def _text_of(model: TextModel, ids: list[int]) -> str:
    try:
        return model.decode(ids)
    except Exception as error:  # tiktoken's for an id that only the model has, whose vocabulary is often rounded up
        return f" (the tokenizer does not decode the model's ids: {type(error).__name__}: {error})"
