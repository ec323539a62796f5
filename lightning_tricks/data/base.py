"""The base class of TextData, TokenData and MixtureData: Lightning's loaders over sources of tokens.

A source has a training and a validation stream of tokens, or one of them; most runs have a single source.

Batches are addressed by position: `cursor.py` says which rows come next, `batches.py` what a batch holds. The
loaders are plain iterables around torch's DataLoader and no DataLoaders, so that Lightning adds no sampler of its own:
our rows already depend on the rank. They refuse a token id that the vocabulary lacks: on a GPU it would end in a
device-side assert without a reason; here the error names the shard, the token in it and the id.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch.utils.data import DataLoader

from lightning_tricks._core.errors import UsageError, check_choice
from lightning_tricks._trainer.lightning import pl, rank_zero_info
from lightning_tricks._trainer.run_facts import data_rank
from lightning_tricks.data.batches import Batch, JoinedBatches, TrainBatches, ValidationBatches, WindowRows
from lightning_tricks.data.cursor import ENDLESS, BatchHistory, DataCursor, FirstRows, first_rows
from lightning_tricks.data.order import Pass, RowOrder, SkippedSamples, windows
from lightning_tricks.data.packed_rows import PackedRows, Packing
from lightning_tricks.data.shards import TokenStream
from lightning_tricks.data.shuffled_documents import Shuffle, ShuffledDocuments
from lightning_tricks.data.tokenizer import (
    changes_text,
    check_same,
    find_record,
    token_texts,
    tokenizer_record,
    vocabulary_size,
)

Batches = TrainBatches | ValidationBatches | JoinedBatches
RowPlan = type[PackedRows] | type[ShuffledDocuments] | None
SCANNED_TOKENS = 1 << 28  # training tokens read before the start, in half a second; later ones are checked in batches


@dataclass(eq=False)
class Source:
    """Tokens that a run reads, and how a checkpoint knows them.

    Args:
        streams: `train` and `val`, or one of them.
        fingerprint: of the data's names and settings.
        content: fingerprint of the data themselves, where `fingerprint` does not depend on them.
        byte_corrections: of the stream `val`, see `ValidationBatches`; None: not known, and needless where the
            tokenizer changes no text.
        name: in a mixture.
        seed: of the order of its rows.
        row_plan: the class that plans its training rows; None: they are windows of the stream.
        planned: these rows, once there is a plan of them.
    """

    streams: dict[str, TokenStream]
    fingerprint: str
    content: str | None = None
    byte_corrections: NDArray[np.int64] | None = None
    name: str = ""
    seed: int = 0
    row_plan: RowPlan = None
    planned: PackedRows | ShuffledDocuments | None = None

    def plan(self, seq_len: int, eot_id: int | None, cache_dir: Path) -> None:
        """Make the plan of the training rows, or open it, where there should be one.

        Raises:
            UsageError: see the classes of plans.
        """
        if self.row_plan is None or self.planned is not None:
            return
        data = f"{self.fingerprint} {self.content}"
        self.planned = self.row_plan(cache_dir, self.streams["train"], eot_id, seq_len, self.seed, data)
        self.fingerprint += f" {self.planned.mark}"

    @property
    def plan_summary(self) -> str:
        """For the line on the data."""
        return "" if self.planned is None else f"; {self.planned.summary()}"


class TokenIdCheck:
    """Compares token ids with the smallest vocabulary that it was given."""

    def __init__(self) -> None:
        self.bound: int | None = None
        self.whose = ""

    def scan(self, sources: Sequence[dict[str, TokenStream]], vocab_size: int, whose: str) -> None:
        """Check the streams of each source now and every batch from now on; see `TokenDataModule.check_ids`."""
        for streams in sources:
            for split, stream in streams.items():
                limit = SCANNED_TOKENS // len(sources) if split == "train" else len(stream)
                if (offset := stream.first_at_least(vocab_size, limit)) is not None:
                    raise _wrong_id(stream.describe(offset), stream.read(offset, 1)[0], vocab_size, whose)
        if self.bound is None or vocab_size < self.bound:
            self.bound, self.whose = vocab_size, whose

    def check(self, batches: Batches, key: int, batch: Batch) -> None:
        """Refuse a batch with an id that is too large: two maxima on the CPU, which take microseconds."""
        if self.bound is None:
            return
        labels, inputs = batch["labels"].numpy(), batch["input_ids"].numpy()
        if max(int(labels.max()), int(inputs.max())) < self.bound:
            return
        for tokens, before in ((labels, 0), (inputs, 1)):
            for row, place in np.argwhere(tokens >= self.bound).tolist():
                raise _wrong_id(batches.describe(key, row, place, before), tokens[row, place], self.bound, self.whose)


def _wrong_id(where: str, token: int, vocab_size: int, whose: str) -> UsageError:
    return UsageError(
        f"{where}: id {token} does not fit {whose}, which has {vocab_size} "
        "tokens; raise vocab_size or use the tokenizer that wrote the shard"
    )


class Loader:
    """Yields `batches[key]` for each key in order, fetched ahead by workers and pinned for a CUDA device.

    Args:
        batches: the dataset. The key of a training batch is its first row, that of a validation batch its number.
        keys: called at each `iter`, returns the keys to serve from now on. Their end may change meanwhile:
            they are asked again before each batch.
        num_workers: processes that fetch; 0 fetches in this one. The batches and their order are the same.
        id_check: refuses a batch before it is yielded.
        trainer: whose device gets the batches. None: they are pinned if there is CUDA.
    """

    addressed_by_position = True  # ExactResume has nothing to do for a loader that says so

    def __init__(
        self,
        batches: Batches,
        keys: Callable[[], Iterable[int]],
        num_workers: int,
        id_check: TokenIdCheck,
        trainer: Any = None,
    ) -> None:
        self.batches, self.keys, self.num_workers, self.id_check = batches, keys, num_workers, id_check
        self.trainer = trainer

    def __iter__(self) -> Iterator[Batch]:
        return self._load(self.keys())

    def _load(self, keys: Iterable[int]) -> Iterator[Batch]:
        if self.num_workers:
            yield from self._from_workers(keys)
            return
        pin = self._pins()
        for key in keys:
            batch = self.batches[key]
            self.id_check.check(self.batches, key, batch)
            yield {name: tensor.pin_memory() for name, tensor in batch.items()} if pin else batch

    def _pins(self) -> bool:
        """Whether batches are copied to a CUDA device."""
        on_cuda = self.trainer is None or self.trainer.strategy.root_device.type == "cuda"
        return on_cuda and torch.cuda.is_available()

    def _from_workers(self, keys: Iterable[int]) -> Iterator[Batch]:
        loader = DataLoader(
            self.batches,
            batch_size=None,
            # to no end: a DataLoader stops once its workers have fetched all up to the end that they knew
            sampler=keys.without_end() if isinstance(keys, FirstRows) else keys,
            num_workers=self.num_workers,
            pin_memory=self._pins(),
            # its own generator: drawing the workers' seed must not move the run's random numbers
            generator=torch.Generator().manual_seed(0),
        )
        # not strict: workers fetch batches beyond the end, which nobody takes unless the end moves
        try:
            for key, batch in zip(keys, loader, strict=False):
                self.id_check.check(self.batches, key, batch)
                yield batch
        except UsageError as error:  # torch puts the traceback of the worker before its words
            raise UsageError(str(error).rpartition(f"{UsageError.__name__}: ")[2].strip()) from None


class SizedLoader(Loader):
    """A loader whose length is the number of its batches; the training loader has none."""

    def __len__(self) -> int:
        keys = self.keys()
        assert isinstance(keys, Sized)
        return len(keys)


class TokenDataModule(pl.LightningDataModule):
    """Training and validation loaders over token streams; a subclass calls `use` in its `setup`.

    The arguments are those of the subclasses.
    """

    cache_dir: Path

    def __init__(
        self,
        seq_len: int,
        micro_batch_size: int,
        num_workers: int,
        seed: int,
        document_ids: bool,
        skip_samples: list[list[int]] | None,
        packing: Packing = "cut",
        shuffle: Shuffle = "rows",
    ) -> None:
        super().__init__()
        check_choice("packing", packing, Packing)
        check_choice("shuffle", shuffle, Shuffle)
        if packing == "best_fit" and shuffle == "documents":
            raise UsageError(
                "shuffle=documents: the rows of packing=best_fit are planned once; set shuffle: rows or packing: cut"
            )
        self.packing, self.shuffle = packing, shuffle
        self.seq_len, self.micro_batch_size, self.num_workers = seq_len, micro_batch_size, num_workers
        self.seed, self.document_ids = seed, document_ids
        for option, least in (("seq_len", 1), ("micro_batch_size", 1), ("num_workers", 0)):
            if not isinstance(value := getattr(self, option), int) or value < least:
                raise UsageError(f"{option}={value}: it must be a whole number of at least {least}")
        self.tokenizer: Tokenizer | None = None
        self._given_tokenizer: Tokenizer | None = None
        self._tokenizer_name = ""
        self.vocab_size: int | None = None
        self.eot_id: int | None = None
        self.sources: list[Source] = []
        self.token_texts: list[bytes] | None = None
        self._knows_bytes = False  # of all validation tokens
        self._validated: ValidationBatches | JoinedBatches | None = None
        self._tokenizer_record: dict[str, Any] | None = None
        self._id_check = TokenIdCheck()
        self.skip_samples = skip_samples
        identity = {"seed": seed, "seq_len": seq_len}
        self._cursor = DataCursor(micro_batch_size, identity, SkippedSamples(skip_samples))

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and copies: all but the Trainer, which gives itself at the next start, and has open iterators."""
        return {**self.__dict__, "trainer": None}

    def is_prepared(self) -> bool:
        """Whether `prepare_data` has nothing to do."""
        return True

    def open_source(self) -> Source:
        """Open the tokens, which `prepare_data` has made; for a mixture and for `setup`."""
        raise NotImplementedError

    @property
    def streams(self) -> dict[str, TokenStream]:
        """The streams of the only source, by `train` and `val`; empty before `setup`."""
        (source,) = self.sources or [Source({}, "")]
        return source.streams

    def use(self, sources: Sequence[Source], tokenizer: Tokenizer | None, tokenizer_name: str) -> None:
        """Serve sources; checkpoints record their fingerprints and the tokenizer's name.

        Args:
            sources: at least one.
            tokenizer: that wrote all of them, if it is known.
            tokenizer_name: for messages.

        Raises:
            UsageError: too little text for one row, or ids that the tokenizer does not have.
        """
        self.sources, self.tokenizer = list(sources), tokenizer
        if self.document_ids and not self.knows_documents:
            raise UsageError("document_ids=True: documents end at the end-of-text token; give eot_id or tokenizer")
        self._plan_rows(self.sources)
        self._cursor.identity |= self._identity()
        if tokenizer is not None:
            self.token_texts = token_texts(tokenizer)
            validated = [source for source in sources if "val" in source.streams]
            unchanged = [source for source in validated if source.byte_corrections is None]
            reason = changes_text(tokenizer) if unchanged else None
            self._knows_bytes = reason is None
            if reason is None:
                for source in unchanged:
                    source.byte_corrections = np.zeros((0, 2), dtype=np.int64)
            else:
                name = tokenizer_name or "of the data"
                rank_zero_info(f"No bits per byte: the bytes behind tokens of {name} are not known ({reason})")
            self.check_ids(vocabulary_size(tokenizer), "the tokenizer")
            self._tokenizer_record = tokenizer_record(tokenizer, tokenizer_name, self.eot_id)

    def _identity(self) -> dict[str, Any]:
        """The fingerprints of the only source, for the cursor; see `DataCursor`."""
        (source,) = self.sources
        found = {"data": source.fingerprint, "content": source.content}
        return {name: value for name, value in found.items() if value is not None}

    @property
    def knows_documents(self) -> bool:
        """Whether it is known where documents end, by the end-of-text token or by an index; after `setup`."""
        streams = [stream for source in self.sources for stream in source.streams.values()]
        return self.eot_id is not None or all(stream.knows_documents for stream in streams)

    @property
    def row_plan(self) -> RowPlan:
        """The class that plans the training rows."""
        if self.packing == "best_fit":
            return PackedRows
        return ShuffledDocuments if self.shuffle == "documents" else None

    def _plan_rows(self, sources: Sequence[Source]) -> None:
        """Plan rows where there should be a plan; refuses too few tokens for one row."""
        for source in sources:
            if "train" in source.streams:
                self._check_length(source.streams["train"])
                source.plan(self.seq_len, self.eot_id, self.cache_dir)

    def _check_length(self, train: TokenStream) -> None:
        """Refuse too few tokens for one row."""
        if (tokens := len(train)) <= self.seq_len:
            raise UsageError(f"seq_len={self.seq_len}: the training data has {tokens} tokens; shorten it or add text")

    def check_ids(self, vocab_size: int, whose: str = "the model") -> None:
        """Refuse token ids that a vocabulary lacks: in the shards now, and in every batch from now on.

        The first 2**28 training tokens and all validation tokens are read once; the result is remembered.

        Args:
            vocab_size: ids 0..vocab_size-1 are accepted.
            whose: owner of the vocabulary, for the message.

        Raises:
            UsageError: names the shard, the token in it and the id of the first one that is too large.
        """
        self._id_check.scan([source.streams for source in self.sources], vocab_size, whose)

    def train_dataloader(self) -> Loader:
        """Micro-batches from the run's cursor to its last step."""
        if self.trainer is not None:
            self._begin(self.trainer)
        batches = self._training_batches(self.micro_batch_size, self._cursor.skipped)
        keys = partial(self._first_rows_from_now, batches.order.rows_in_pass)
        return Loader(batches, keys, self.num_workers, self._id_check, self.trainer)

    def _begin(self, trainer: pl.Trainer) -> None:
        """Fix where this run starts."""
        self._cursor.begin(trainer)

    def _first_rows_from_now(self, rows_in_pass: int) -> Iterable[int]:
        if self.trainer is None:
            return first_rows(0, ENDLESS, 1, self.micro_batch_size)
        return self._cursor.first_rows(self.trainer, rows_in_pass)

    def micro_batches_in_pass(self, trainer: pl.Trainer) -> int:
        """Micro-batches of each process in one pass over the training data, an epoch where `max_epochs` counts."""
        return self._order().rows_in_pass // self._cursor.rows_at_once(trainer)

    def training_rows(self) -> TrainBatches:
        """All training rows by their sample position, also those in `skip_samples`; after `setup`."""
        return self._training_batches(1)

    def _training_batches(self, micro_batch_size: int, skipped: SkippedSamples | None = None) -> TrainBatches:
        rows = [source.planned or WindowRows(source.streams["train"], self.eot_id) for source in self.sources]
        return TrainBatches(rows, self._order(skipped), self.seq_len, micro_batch_size, self.document_ids)

    def _order(self, skipped: SkippedSamples | None = None) -> RowOrder:
        return RowOrder([self._pass(source) for source in self.sources], skipped=skipped)

    def _pass(self, source: Source) -> Pass:
        """The rows of a source."""
        if source.planned is not None:
            return source.planned.in_epochs(source.seed)
        return windows(len(source.streams["train"]), self.seq_len, source.seed)

    def source_files(self, offsets: Sequence[int], source: int = 0) -> list[Path | None]:
        """The text file behind the tokens at these offsets of a source's training stream; None if it is not known."""
        return [None] * len(offsets)

    def val_dataloader(self) -> Loader | list[Any]:
        """Batches in which every validation token but the first is a label once; an empty list without validation."""
        parts = {n: self._validation(source) for n, source in enumerate(self.sources) if "val" in source.streams}
        if not parts:
            return []
        batches = JoinedBatches(parts) if len(self.sources) > 1 else parts[0]
        self._validated = batches
        return SizedLoader(batches, partial(range, len(batches)), self.num_workers, self._id_check, self.trainer)

    def validation_source(self, batch_idx: int) -> int:
        """The number of the source whose rows a validation batch has."""
        return self._validated.source(batch_idx) if isinstance(self._validated, JoinedBatches) else 0

    def _validation(self, source: Source) -> ValidationBatches:
        texts = self.token_texts if self._knows_bytes else None
        rank, world = data_rank(self.trainer)
        return ValidationBatches(
            source.streams["val"],
            self.seq_len,
            self.micro_batch_size,
            token_bytes=None if texts is None else np.array([len(text) for text in texts], dtype=np.int64),
            eot_id=self.eot_id,
            with_document_ids=self.document_ids,
            rank=rank,
            world=world,
            byte_corrections=source.byte_corrections,
        )

    test_dataloader = predict_dataloader = val_dataloader

    def state_dict(self) -> dict[str, Any]:
        """Rows consumed at the last completed optimizer step, the settings that number depends on, the tokenizer."""
        if self.trainer is None:
            return {}
        return {**self._cursor.state_dict(self.trainer), "tokenizer": self._tokenizer_record}

    def step_samples(self) -> list[tuple[int, int]] | None:
        """First and last position of each run of samples in the running optimizer step, of all ranks together.

        None without a Trainer, and while overfitting.
        """
        return None if self.trainer is None else self._cursor.step_samples(self.trainer)

    def samples_of_step(self, step: int, state: dict[str, Any]) -> list[tuple[int, int]]:
        """First and last position of each run of samples that an optimizer step took, of all ranks together.

        Args:
            step: as the logs count, from 0. For one that the checkpoint has not done, the answer is that of a run which
                goes on without a change.
            state: this module's in a checkpoint of the run.

        Raises:
            UsageError: the checkpoint's run took other data; the step came before these data.
        """
        self.check_tokenizer({"": state})
        return self._cursor.samples_of_step(step, state)

    def rows_of_steps(self, steps: int, state: dict[str, Any]) -> int | None:
        """Rows that the first `steps` optimizer steps of a run took, all ranks together; None where it is not known.

        Args:
            steps: counted over the resumes.
            state: this module's in a checkpoint of the run.
        """
        return BatchHistory.of_state(state["history"]).rows(steps)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """In a fit, go on with the row after those of the checkpoint.

        Raises:
            UsageError: see `check_tokenizer`.
        """
        self.check_tokenizer({"": state_dict})
        if self.trainer is None or self.trainer.state.fn == "fit":  # not to validate or to test: a fit may follow
            self._cursor.load_state_dict(state_dict)

    def check_tokenizer(self, checkpoint: dict[str, Any]) -> None:
        """Refuse a checkpoint that was trained with another tokenizer; one without a tokenizer is accepted.

        Args:
            checkpoint: with the state of its data module, of this class or another.

        Raises:
            UsageError: names both tokenizers.
        """
        saved = find_record(checkpoint)
        if saved is not None and self._tokenizer_record is not None:
            check_same(saved, self._tokenizer_record)

    def data_summary(self) -> str:
        """One line on the training data; after `setup`."""
        return "; ".join(f"{source.name}: " * bool(source.name) + _counted(source) for source in self.sources)

    def __str__(self) -> str:
        return self.data_summary() if self.sources else type(self).__name__

    def training_text(self) -> bytes:
        """The UTF-8 text of the training documents, one after the other, without special tokens."""
        return self._text("train")

    def validation_text(self) -> bytes:
        """The UTF-8 text of the validation documents, one after the other, without special tokens."""
        return self._text("val")

    def _text(self, split: str) -> bytes:
        if self.token_texts is None:
            raise UsageError("tokenizer: the text behind the tokens needs a byte-level tokenizer; give its file")
        streams = [source.streams[split] for source in self.sources if split in source.streams]
        if not streams:
            raise UsageError("val=None: there is no validation text; give the validation shards")
        texts = self.token_texts
        return b"".join(texts[token] for stream in streams for token in stream.read(0, len(stream)).tolist())


def _counted(source: Source) -> str:
    parts = [f"{len(s):,} {name} tokens in {len(s.paths)} shard(s)" for name, s in source.streams.items()]
    return f"{' and '.join(parts)}{source.plan_summary}; {next(iter(source.streams.values())).paths[0].parent}"
