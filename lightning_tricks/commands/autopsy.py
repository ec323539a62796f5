"""`autopsy`: the documents of one optimizer step's batch by their loss.

First the samples that the step took, by what the checkpoints of its run tell, and the documents in their rows; then
their losses, with the weights of a checkpoint; then the command.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.quote import printable, say
from lightning_tricks.checkpoints.bucket import local_copy
from lightning_tricks.checkpoints.load_weights import matched
from lightning_tricks.checkpoints.open_checkpoint import open_checkpoint
from lightning_tricks.commands.answers import check_json, write_json
from lightning_tricks.data.base import TokenDataModule
from lightning_tricks.data.batches import IGNORED, Batch, TrainBatches
from lightning_tricks.language_model import LanguageModel

SHOWN = 100  # characters of a document's text
Runs = list[tuple[int, int]]  # first and last position of each unbroken run of samples


@dataclass(frozen=True)
class Samples:
    """The samples of a step, and a checkpoint that has done the step and so tells them.

    Without one, they are those of a run that goes on from the given checkpoint with the same global batch.
    """

    runs: Runs
    told_by: Path | None


def samples_of_step(data: Any, checkpoint: Mapping[str, Any], path: Path, step: int, max_steps: int) -> Samples:
    """The samples that a step took, of all ranks and micro-batches together.

    A checkpoint from before the step cannot know whether the run went on with another global batch. Then the later ones
    in its folder are asked.

    Args:
        data: TextData or TokenData, set up.
        checkpoint: the content of `path`.
        path: the checkpoint.
        step: as the logs count, from 0.
        max_steps: of the recipe, -1 for no end.

    Raises:
        UsageError: the checkpoint has no state of the data, or of other data; the run has no such step.
    """
    kind = type(data).__qualname__
    state = checkpoint.get(kind)
    if not isinstance(state, dict) or "samples" not in state:
        raise UsageError(
            f"ckpt_path={path}: it holds no state of {kind}, so nothing tells which samples a step took: give a "
            "checkpoint of a run on these data with all its state (not save_weights_only)"
        )
    runs = data.samples_of_step(step, state)
    done = int(checkpoint.get("global_step", 0))
    if step < done:
        return Samples(runs, path)
    begun = [span for span in state["history"] if span["step"] <= done]  # without the stages to come of a growing batch
    for other, later in _later_states(path, kind, step):
        if begun and later.get("history", [])[: len(begun)] == begun:  # this run may have gone on to that checkpoint
            return Samples(data.samples_of_step(step, later), other)
    if 0 <= max_steps <= step:
        last = max(max_steps, done) - 1
        raise UsageError(f"step={step}: the run ends with step {last}, counted from 0 (trainer.max_steps={max_steps})")
    return Samples(runs, None)


def _later_states(path: Path, kind: str, step: int) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The data's state in each checkpoint of the folder that has done the step."""
    for other in sorted(other for other in path.parent.glob("*.ckpt") if not other.is_symlink()):
        try:
            content = open_checkpoint(other, parts=(), weights_only=True, verify=False)
        except (UsageError, OSError):
            continue  # this one is not the one that was asked for
        state = content.get(kind) if isinstance(content, dict) and content.get("global_step", 0) > step else None
        if isinstance(state, dict):
            yield other, state


@dataclass(frozen=True, eq=False)
class Document:
    """Tokens of a row that belong together: those up to an end-of-text token, or between two.

    A row's first token has no loss and belongs to none, as nothing comes before it. The end-of-text token belongs to
    the document that it ends.
    """

    row: int  # index of its row in the batch
    sample: int  # sample position of the row
    first: int  # index of its first token among the row's labels
    stop: int  # index after its last one
    source: int  # number of the source that it comes from
    token: int  # offset of its first token in the source's training stream
    ids: NDArray[np.int64]  # its tokens, (stop - first,)

    @property
    def tokens(self) -> int:
        """Number of its tokens, each of which has a loss."""
        return self.stop - self.first


def rows_of(rows: TrainBatches, runs: Runs) -> tuple[list[int], list[Batch]]:
    """The sample positions of a step, by their unbroken runs, and their rows, each a batch of one row."""
    samples = [sample for first, last in runs for sample in range(first, last + 1)]
    return samples, [rows[sample] for sample in samples]


def documents_of(
    rows: TrainBatches, samples: Sequence[int], batches: Sequence[Batch], eot: int | None
) -> list[Document]:
    """The documents of a batch, row by row; without an end-of-text token `eot` or an index of them, each row is one."""
    found = []
    for row, (sample, batch) in enumerate(zip(samples, batches, strict=True)):
        labels, inputs = batch["labels"].numpy(), batch["input_ids"].numpy()[0]
        begins = rows.begins(sample, 0, inputs) if eot is None else None
        for first, stop in _spans(inputs, labels[0], eot, begins):
            source, token = rows.offset(sample, 0, first)
            found.append(Document(row, sample, first, stop, source, token, labels[0, first:stop]))
    return found


def _spans(
    inputs: NDArray[np.int64], labels: NDArray[np.int64], eot: int | None, begins: NDArray[np.bool_] | None
) -> list[tuple[int, int]]:
    """First index of each document in the labels (T,), and the index after its last.

    In a packed row a piece of another document also begins where the input is not the label before it.
    """
    length = int((labels != IGNORED).sum())  # a row is filled up at its end
    if eot is not None:
        before, after = labels[: length - 1], inputs[1:length]
        edges = np.flatnonzero((before == eot) | (before != after)) + 1
    else:  # a label is the token after its input
        edges = np.flatnonzero([] if begins is None else begins[2:length]) + 1
    return list(pairwise([0, *edges.tolist(), length]))


def joined(batches: Sequence[Batch], device: torch.device) -> Batch:
    """Rows as one batch on a device."""
    names = [name for name in batches[0] if all(name in batch for batch in batches)]  # some may lack document_starts
    return {name: torch.cat([batch[name] for batch in batches]).to(device) for name in names}


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
            lines.append("the samples are those of a run that continues with the global batch of this checkpoint")
        elif self.samples.told_by != self.checkpoint:
            lines.append(f"the samples are known from {self.samples.told_by}")
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
    path, device = local_copy(checkpoint_path), torch.device(device)
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
    ranked = []
    for number, source in enumerate(data.sources):
        of_source = [document for document in documents if document.source == number]
        files = data.source_files([document.token for document in of_source], number)
        for document, file in zip(of_source, files, strict=True):
            loss = sum(nats[document.row][document.first : document.stop]) / document.tokens
            place = source.streams["train"].place(document.token)
            ranked.append(RankedDocument(document, loss, _text(data, document), place, file))
    ranked.sort(key=lambda each: each.loss if math.isfinite(each.loss) else math.inf, reverse=True)
    return Report(step, asked, path, int(checkpoint.get("global_step", 0)), ranked)


def _check_kinds(module: Any, data: Any) -> None:
    """Refuse what has no loss of each token, or no sample positions."""
    if not isinstance(module, LanguageModel):
        raise UsageError(
            f"autopsy: model={type(module).__name__} is no LanguageModel, whose decoder gives the loss of each document"
        )
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
    """The beginning of a document on one line; its token ids where no tokenizer is known."""
    ids = document.ids[:SHOWN].tolist()
    known = data.tokenizer is not None
    text = data.tokenizer.decode(ids, skip_special_tokens=False) if known else f"token ids {' '.join(map(str, ids))}"
    return printable(text[:SHOWN]) + ("..." if len(text) > SHOWN or document.tokens > SHOWN else "")


def _finite(number: float) -> float | None:
    """JSON has no NaN and no infinity."""
    return number if math.isfinite(number) else None


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
        json: file for all documents, - for standard output.
        weights_only: as in torch.load.
    """
    if ckpt_path is None:
        raise UsageError("ckpt_path=none: autopsy needs the checkpoint of a run, which tells the samples of a step")
    if top < 0:
        raise UsageError(f"top={top}: give the number of documents to print, 0 or more")
    check_json("autopsy", json)
    report = autopsy(
        model,
        datamodule,
        ckpt_path,
        step,
        device=trainer.strategy.root_device,
        max_steps=trainer.max_steps,
        weights_only=weights_only,
    )
    if json != "-":
        say(*report.table(top).split("\n"))
    write_json(json, report.to_json())
