"""Rebuild the batch of one optimizer step, and list its documents by their loss."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lightning_tricks._core.errors import UsageError
from lightning_tricks.checkpoints.load_weights import matched
from lightning_tricks.checkpoints.open_checkpoint import open_checkpoint
from lightning_tricks.commands.autopsy.documents import (
    Document,
    Samples,
    documents_of,
    joined,
    rows_of,
    samples_of_step,
)
from lightning_tricks.data.base import TokenDataModule
from lightning_tricks.language_model import LanguageModel

SHOWN = 100  # characters of a document's text


@dataclass(frozen=True)
class RankedDocument:
    """All that is known of one document."""

    document: Document
    loss: float  # nats per token
    text: str  # of its first tokens, with control characters made visible
    shard: tuple[Path, int]  # the file that holds it, and the index of its first token there
    file: Path | None  # the text file that it was made of; None where that is not known

    def __str__(self) -> str:
        """Its loss, tokens and place, and a line of its text."""
        d = self.document
        place = f"sample {d.sample}, tokens {d.first + 1} to {d.stop}; {self.shard[0]}, token {self.shard[1]}"
        place += f"; {self.file}" if self.file else ""
        return f"{self.loss:7.3f} {d.tokens:7d}  {place}\n      {self.text}"

    def to_json(self) -> dict[str, Any]:
        """The same as plain types; a loss that is not finite is None."""
        d = self.document
        place = {"sample": d.sample, "first_token": d.first + 1, "last_token": d.stop, "stream_token": d.token}
        source = {"shard": str(self.shard[0]), "shard_token": self.shard[1], "file": self.file and str(self.file)}
        return {**place, **source, "tokens": d.tokens, "text": self.text, "loss": _finite(self.loss)}


@dataclass(frozen=True)
class Report:
    """The documents in the batch of a step."""

    step: int  # as the logs count, from 0
    samples: Samples
    checkpoint: Path  # whose weights were used
    checkpoint_step: int  # optimizer steps done in it
    documents: Sequence[RankedDocument]  # those with a loss that is not finite, then by loss, the highest first

    @property
    def tokens(self) -> int:
        """Tokens with a loss."""
        return sum(each.document.tokens for each in self.documents)

    @property
    def loss(self) -> float:
        """Nats per token of the batch."""
        return math.fsum(each.loss * each.document.tokens for each in self.documents) / self.tokens

    def table(self, top: int) -> str:
        """The batch in a few lines, and the `top` first documents."""
        rows = [f"{place:4d} {document}" for place, document in enumerate(self.documents[:top], start=1)]
        return "\n".join([*self._summary(), *(["", "        loss  tokens", *rows] if rows else [])])

    def _summary(self) -> list[str]:
        runs = " and ".join(f"{first} to {last}" for first, last in self.samples.runs)
        count = sum(last - first + 1 for first, last in self.samples.runs)
        lines = [
            f"step {self.step} took the samples {runs}: {count} rows, {len(self.documents)} documents, "
            f"{self.tokens} tokens, {self.loss:.4f} nats per token",
            f"weights: {self.checkpoint}, {self._distance()}",
        ]
        if self.samples.told_by is None:
            lines.append("the samples are those of a run that goes on with the global batch of this checkpoint")
        elif self.samples.told_by != self.checkpoint:
            lines.append(f"the samples are told by {self.samples.told_by}")
        return lines

    def _distance(self) -> str:
        away = self.checkpoint_step - self.step
        if away == 0:
            return f"of step {self.checkpoint_step}: the step began with them"
        return f"of step {self.checkpoint_step}: {abs(away)} steps {'after' if away > 0 else 'before'} the step began"

    def to_json(self) -> dict[str, Any]:
        """All documents as plain types."""
        return {
            "step": self.step,
            "samples": [list(run) for run in self.samples.runs],
            "samples_told_by": self.samples.told_by and str(self.samples.told_by),
            "tokens": self.tokens,
            "loss": _finite(self.loss),
            "checkpoint": str(self.checkpoint),
            "checkpoint_step": self.checkpoint_step,
            "documents": [document.to_json() for document in self.documents],
        }

    def write(self, file: Path) -> None:
        """Write `to_json` to a file."""
        file.write_text(json.dumps(self.to_json(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def autopsy(
    module: Any,
    data: Any,
    checkpoint_path: str | Path,
    step: int,
    *,
    device: torch.device | str = "cpu",
    max_steps: int = -1,
    weights_only: bool | None = None,
) -> Report:
    """The documents of a step's batch by their loss, in one process, whatever number the run had.

    The samples are those that all ranks and micro-batches of the step took together, by the record of the
    global batch in the checkpoint, or in a later one beside it. Everything is computed in fp32.

    Args:
        module: a LanguageModel that is not built yet; it gets the checkpoint's weights.
        data: the TextData or TokenData of the run.
        checkpoint_path: file or folder of shards; its step need not be the one before `step`.
        step: as the logs count: the first is step 0, and step N begins with the weights of a checkpoint of step N.
        device: to compute on.
        max_steps: of the run, -1 for no end.
        weights_only: as in `torch.load`, of the checkpoint.

    Raises:
        UsageError: another kind of module or data; a checkpoint without the data's state, or of other data; a step
            that the run has not; no whole checkpoint.
    """
    _check_kinds(module, data)
    path, device = Path(checkpoint_path), torch.device(device)
    checkpoint = open_checkpoint(path, weights_only=weights_only)
    data.prepare_data()
    data.setup("fit")
    asked = samples_of_step(data, checkpoint, path, step, max_steps)
    _build(module, data, checkpoint, path, device)
    rows = data.training_rows()
    samples, batches = rows_of(rows, asked.runs)
    documents = documents_of(rows, samples, batches, data.eot_id)
    nats = []
    for first in range(0, len(batches), data.micro_batch_size):
        with torch.no_grad():
            nats += (-module.predict_step(joined(batches[first : first + data.micro_batch_size], device), 0)).tolist()
    files = data.source_files([document.token for document in documents])
    ranked = []
    for document, file in zip(documents, files, strict=True):
        loss = sum(nats[document.row][document.first : document.stop]) / document.tokens
        place = data.streams["train"].place(document.token)
        ranked.append(RankedDocument(document, loss, _text(data, document), place, file))
    ranked.sort(key=lambda each: each.loss if math.isfinite(each.loss) else math.inf, reverse=True)
    return Report(step, asked, path, int(checkpoint.get("global_step", 0)), ranked)


def _check_kinds(module: Any, data: Any) -> None:
    """Refuse what has no loss of each token, or no sample positions."""
    if not isinstance(module, LanguageModel):
        raise UsageError(
            f"autopsy: model={type(module).__name__} is no LanguageModel, whose decoder gives the loss of each document"
        )
    if not module.automatic_optimization:
        raise UsageError(f"autopsy: {type(module).__name__} steps its optimizers itself, so its steps have no batch")
    if not isinstance(data, TokenDataModule):
        kind = "none" if data is None else type(data).__name__
        raise UsageError(f"autopsy: data={kind}: its batches have no sample positions; TextData's and TokenData's have")


def _build(module: Any, data: Any, checkpoint: Any, path: Path, device: torch.device) -> None:
    """Build the decoder on the device and load the checkpoint's weights, as fp32."""
    if "decoder_config" not in checkpoint:
        raise UsageError(f"ckpt_path={path}: it holds no decoder, so it is not of a LanguageModel")
    module.compile_blocks = False  # one batch is not worth the time to compile
    with device:
        module.configure_model()
    module.on_load_checkpoint(checkpoint)
    module.load_state_dict(matched(module, checkpoint["state_dict"], path), strict=False)  # names have been compared
    module.eval()
    data.check_ids(module.config.vocab_size)


def _text(data: Any, document: Document) -> str:
    """The beginning of a document; its token ids where no tokenizer is known."""
    ids = document.ids[:SHOWN].tolist()
    if data.tokenizer is None:
        return "token ids " + visible(" ".join(map(str, ids)))
    text = data.tokenizer.decode(ids, skip_special_tokens=False)
    return visible(text) + ("..." if len(text) <= SHOWN and document.tokens > SHOWN else "")


def visible(text: str, length: int = SHOWN) -> str:
    r"""The first characters of a text on one line, each that cannot be printed as its escape.

    Example:
        >>> print(visible("two\nlines\x00", 20))
        two\nlines\x00
    """
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[:length])
    return shown + ("..." if len(text) > length else "")


def _finite(number: float) -> float | None:
    """JSON has no NaN and no infinity."""
    return number if math.isfinite(number) else None
