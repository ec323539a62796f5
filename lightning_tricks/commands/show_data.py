"""`show-data`: training rows as the model gets them, decoded, with their source and the ends of their documents."""

import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.quote import printable, say
from lightning_tricks.data.base import TokenDataModule
from lightning_tricks.data.batches import IGNORED, Batch, TrainBatches

_LEAST_WIDTH, _WIDTH = 60, 120  # characters of a line: at least; where nothing tells the width of a terminal


def run(model: Any, datamodule: Any, trainer: Any, *, rows: int = 10, first: int = 0) -> None:
    """Print training rows: their source, their documents, and the beginning and the end of each document's text.

    Args:
        model: of the recipe.
        datamodule: of the recipe.
        trainer: of the recipe.
        rows: to print.
        first: sample position of the first one, as skip_samples and StepGuard count.

    Raises:
        UsageError: other data than ours; fewer than one row; a position below 0.
    """
    for option, value, least in (("rows", rows, 1), ("first", first, 0)):
        if value < least:
            raise UsageError(f"show-data: {option}={value}: give a whole number of at least {least}")
    if not isinstance(datamodule, TokenDataModule):
        kind = "none" if datamodule is None else type(datamodule).__name__
        raise UsageError(f"show-data: data={kind}: its rows have no positions; those of TextData and TokenData have")
    datamodule.prepare_data()
    datamodule.setup("fit")
    datamodule.document_ids |= datamodule.knows_documents  # rows then say where their documents end
    say(datamodule.data_summary(), *lines_of_rows(datamodule, range(first, first + rows)))


def lines_of_rows(data: Any, samples: range) -> Iterator[str]:
    """A heading for each row and a line for each of its documents, then the shares of the sources in these rows."""
    rows = data.training_rows()
    batches = {sample: rows[sample] for sample in samples}
    tokens, documents, padding = Counter[str](), 0, 0
    width = max(shutil.get_terminal_size((_WIDTH, 24)).columns, _LEAST_WIDTH)
    for (sample, batch), place in zip(batches.items(), _places(data, rows, batches), strict=True):
        spans, length = _spans(batch), batch["input_ids"].shape[1]
        name = data.sources[int(batch["source"][0])].name if "source" in batch else ""  # of a mixture
        tokens[name] += length
        documents, padding = documents + len(spans), padding + int((batch["labels"] == IGNORED).sum())
        count = f"{length} tokens of {len(spans)} {'document' if len(spans) == 1 else 'documents'}"
        yield ""
        yield ", ".join(filter(None, (f"sample {sample}", name, count, place)))
        for begin, end in spans:
            yield f"{end - begin:6}  {_text(data, batch['input_ids'][0, begin:end].tolist(), width - 8)}"
    total = tokens.total()
    shares = "".join(f"; {name} {count / total:.1%}" for name, count in tokens.most_common() if name)
    yield ""
    yield f"{len(samples)} rows: {total:,} tokens of {documents:,} documents, padding {padding / total:.1%}{shares}"


def _places(data: Any, rows: TrainBatches, samples: Iterable[int]) -> list[str]:
    """The text file behind each row's first label, where it is known, and the shard."""
    found = {}
    for source in range(len(data.sources)):
        places = [(sample, rows.offset(sample, 0, 0)) for sample in samples]
        offsets = {sample: offset for sample, (number, offset) in places if number == source}
        files = data.source_files([*offsets.values()], source)
        for sample, file in zip(offsets, files, strict=True):
            shard = rows.describe(sample, 0, 0)
            found[sample] = shard if file is None else f"{file}, {shard}"
    return [found[sample] for sample in samples]


def _spans(batch: Batch) -> list[tuple[int, int]]:
    """First input of each document in a row, and the one after its last; without `document_ids` the whole row."""
    ids = batch["document_ids"][0].numpy() if "document_ids" in batch else np.zeros(1)
    return list(pairwise([0, *(np.flatnonzero(np.diff(ids)) + 1).tolist(), batch["input_ids"].shape[1]]))


def _text(data: Any, ids: list[int], width: int) -> str:
    """The text of token ids on one line; of a long one beginning and end, with the characters left out between."""
    known = data.tokenizer is not None
    text = data.tokenizer.decode(ids, skip_special_tokens=False) if known else f"token ids {' '.join(map(str, ids))}"
    if len(line := printable(text)) <= width:
        return line
    side = (width - 24) // 2
    return f"{line[:side]} [{len(line) - 2 * side:,} characters] {line[-side:]}"
