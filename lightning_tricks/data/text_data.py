"""Batches from text, which is tokenized once into a folder of shards in the cache, and then read by position.

The folder has tokenizer.json, train_*.bin, val_*.bin and meta.json; a reader sees the whole folder or none.
`tokenize_corpus` says how it is made, and which documents are held out; `text_files` how files are cut into documents.
"""

import hashlib
import json
import os
import sys
from collections.abc import Collection, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Any

from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.quote import say
from lightning_tricks._host.address import default_cache_dir
from lightning_tricks._host.writable import check_folder
from lightning_tricks._trainer.lightning import rank_zero_info
from lightning_tricks.data.base import Source, TokenDataModule
from lightning_tricks.data.content import build_once
from lightning_tricks.data.corpus import Corpus, hugging_face, standard_library, text_files
from lightning_tricks.data.packed_rows import Packing
from lightning_tricks.data.shards import ByteCorrections, TokenStream
from lightning_tricks.data.shuffled_documents import Shuffle
from lightning_tricks.data.tokenize_corpus import (
    FORMAT_VERSION,
    TokenizedCorpus,
    document_hash,
    training_sample,
    validation_threshold,
)
from lightning_tricks.data.tokenizer import (
    check_vocab_size,
    end_of_text,
    load_tokenizer,
    open_tokenizer,
    token_texts,
    tokenizer_sha256,
    train_bpe,
    vocabulary_size,
)

__all__ = ["TextData"]


def training_files(corpus: Corpus, val_fraction: float, numbers: Collection[int]) -> dict[int, Path | None]:
    """The files of training documents, by their numbers in the stream from 0; reads the text up to the last of them."""
    if not numbers:
        return {}
    threshold = validation_threshold(corpus.documents(), val_fraction)
    training = (path for path, document in corpus.located() if document_hash(document) >= threshold)
    return {number: path for number, path in enumerate(islice(training, max(numbers) + 1)) if number in numbers}


def learn_tokenizer(texts: Sequence["TextData"], vocab_size: int, cache_dir: Path, learn: bool = True) -> Path | None:
    """The file of a byte-level BPE learned from the training documents of all texts, equally much of each.

    Without `learn`, None where there is none yet.
    """
    identities = [(part.corpus.identity(cache_dir, part.is_recorded), part.val_fraction) for part in texts]
    key = hashlib.sha256(repr((FORMAT_VERSION, identities, vocab_size)).encode()).hexdigest()[:16]

    def build(folder: Path) -> None:
        say(f"Learning a tokenizer of {vocab_size} tokens from {len(texts)} sources", file=sys.stderr)
        samples = (
            training_sample(part.corpus, validation_threshold(part.corpus.documents(), part.val_fraction), len(texts))
            for part in texts
        )
        tokenizer = train_bpe(chain.from_iterable(samples), vocab_size)
        (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")

    folder = cache_dir / f"tokenizer-{key}"
    if learn:
        build_once(folder, build)
    return folder / "tokenizer.json" if folder.is_dir() else None


SEARCHED_BYTES = 4_000_000_000  # of text, in which the file of a document is looked for


class TextData(TokenDataModule):
    """Language-model batches from text; without arguments, from Python's standard library, which every machine has.

    `prepare_data` learns a byte-level BPE from the training documents (or takes yours), encodes each document followed
    by an end-of-text token, and writes shards into the cache, where a second run finds them. If it is killed, the next
    start goes on with the parts that are missing. Documents are held out for validation by their hash.

    Training batches are `input_ids` and `labels`, (micro_batch_size, seq_len) int64, `labels[:, t]` being the token
    after `input_ids[:, t]`. They are addressed by position: a step has the same rows whatever the number of workers,
    in a resumed run too, and for every split of the same global batch into processes and accumulated micro-batches.
    Validation batches cover every validation token but the first once, -100 marks labels that do not count, and
    `n_bytes` gives the bytes behind those that do.

    Args:
        files: a path, folder, glob or URL (`s3://`, `gs://`, `hf://`), or a list of them: .jsonl and .parquet (each row
            is a document), .txt and any other UTF-8 text; with .gz and .zst too. None means the Python standard
            library's sources without its tests.
        hf_dataset: a Hugging Face dataset instead, `owner/name` or `owner/name:config`; its train split is streamed.
        text_field: the key or column that holds the text in .jsonl, .parquet and datasets.
        tokenizer: a `tokenizers` JSON file, or a checkpoint, which holds its own; None learns a byte-level BPE.
        vocab_size: tokens to learn when no tokenizer is given; after `setup`, the attribute is the tokenizer's size.
        seq_len: tokens in a row.
        micro_batch_size: rows in a batch of one process.
        val_fraction: share of the documents held out.
        num_workers: processes that fetch batches; 0 is enough if the shards fit into memory.
        seed: of the order of the training rows.
        document_ids: add `document_ids` and `document_starts`, so that attention can stay within documents.
        cache_dir: folder for the shards; None means $XDG_CACHE_HOME/lightning_tricks or ~/.cache/lightning_tricks.
        skip_samples: training rows to pass over, as [first, last] sample positions, such as StepGuard names them.
        packing: `cut` cuts the training documents, one after the other, every `seq_len` tokens; `best_fit` plans rows
            in which no document is cut that fits a row, but for a few, with at most 0.5 % padding.
        shuffle: `rows` gives each epoch an order of the rows; `documents` also an order of the documents before they
            are cut into rows, so that a document has other neighbours in each epoch.

    Raises:
        UsageError: bad options, text that cannot be read, a cache that cannot be written.
    """

    def __init__(
        self,
        files: str | list[str] | None = None,
        hf_dataset: str | None = None,
        text_field: str = "text",
        tokenizer: str | None = None,
        vocab_size: int = 4096,
        seq_len: int = 256,
        micro_batch_size: int = 8,
        val_fraction: float = 0.05,
        num_workers: int = 0,
        seed: int = 0,
        document_ids: bool = False,
        cache_dir: str | None = None,
        skip_samples: list[list[int]] | None = None,
        packing: Packing = "cut",
        shuffle: Shuffle = "rows",
    ) -> None:
        super().__init__(seq_len, micro_batch_size, num_workers, seed, document_ids, skip_samples, packing, shuffle)
        if files is not None and hf_dataset is not None:
            raise UsageError(f"files={files!r} and hf_dataset={hf_dataset!r}: give one of them")
        if not 0 < val_fraction < 1:
            raise UsageError(f"val_fraction={val_fraction}: it must lie between 0 and 1")
        if tokenizer is None:
            check_vocab_size(vocab_size)
        given = [files] if isinstance(files, str | os.PathLike) else files
        self.files = None if given is None else [str(file) for file in given]
        if self.files == []:
            raise UsageError("files=[]: name at least one, or leave it out for the standard library")
        self.hf_dataset, self.text_field, self.val_fraction = hf_dataset, text_field, val_fraction
        self.cache_dir = default_cache_dir() if cache_dir is None else Path(cache_dir).expanduser()
        self._given_tokenizer, self._tokenizer_name = open_tokenizer(tokenizer)
        self._vocab_size_to_learn = vocab_size
        self.vocab_size = vocab_size if self._given_tokenizer is None else vocabulary_size(self._given_tokenizer)
        self.meta: dict[str, Any] = {}

    @classmethod
    def held_out(cls, files: str, tokenizer: str, **options: Any) -> "TextData":
        """Data whose whole text is for validation, and each byte of it counts; there is no training part.

        A file is one document, or each row of a .jsonl or .parquet file.

        Args:
            files: as in the constructor.
            tokenizer: a JSON file or a checkpoint.
            **options: the constructor's others.

        Raises:
            UsageError: also for a tokenizer that is not byte-level, or has no end-of-text token.
        """
        data = cls(files, tokenizer=tokenizer, **options)
        assert data._given_tokenizer is not None  # a path was given
        if token_texts(data._given_tokenizer) is None:
            raise UsageError(f"text={files!r}: bits per byte need a byte-level tokenizer, and {tokenizer} has another")
        end_of_text(data._given_tokenizer)
        data.val_fraction = 1.0
        return data

    @cached_property
    def corpus(self) -> Corpus:
        """The documents."""
        if self.hf_dataset is not None:
            return hugging_face(self.hf_dataset, self.text_field)
        if self.files is None:
            return standard_library()
        return text_files(self.files, self.text_field, whole=self.val_fraction == 1)

    def check_run(self, trainer: Any, datamodule: Any, stage: str) -> None:
        """Refuse text that is not there, and a library that is missing."""
        _ = self.corpus

    def check_sample(self, vocab_size: int | None) -> str:
        """Read the first document, and see where its tokens are or will be; a line on them, for `check`.

        Args:
            vocab_size: of the model, which its own check compares; None: not known.

        Raises:
            UsageError: text that cannot be read, a cache that cannot be written.
        """
        if next(iter(self.corpus.documents()), None) is None:
            raise UsageError(f"files: {self.corpus.description} holds no text; check the path")
        size = "" if self.corpus.n_bytes is None else f", {self.corpus.n_bytes / 1e6:,.2f} MB"
        text = f"{self.corpus.description}{size}, a tokenizer of {self.vocab_size:,} tokens"
        if (self.folder / "meta.json").is_file():
            return f"{text}; tokenized in {self.folder}"
        check_folder("cache_dir", self.folder.parent)
        return f"{text}; fit tokenizes it first, or prepare"

    @property
    def is_recorded(self) -> bool:
        """Whether one process of this host has asked for the text's identity, in `prepare_data`."""
        return self.trainer is not None and self.trainer.local_rank != 0

    @cached_property
    def folder(self) -> Path:
        """The folder for the shards of exactly this text, tokenizer and split; `prepare_data` makes it."""
        given = self._given_tokenizer
        tokenizer = self._vocab_size_to_learn if given is None else tokenizer_sha256(given)
        identity = self.corpus.identity(self.cache_dir, self.is_recorded)
        key = repr((FORMAT_VERSION, identity, tokenizer, self.val_fraction))
        return self.cache_dir / f"text-{hashlib.sha256(key.encode()).hexdigest()[:16]}"

    def is_prepared(self) -> bool:
        """Whether the text is tokenized."""
        return self.folder.exists()

    def prepare_shards(self) -> None:
        """Tokenize into the cache, unless that has been done."""
        self.prepare_share(0, 1)

    def prepare_share(self, rank: int, world: int) -> int:
        """Tokenize one share of the text into a cache that all ranks see; the last one to finish makes the data set.

        Ranks need not run at once. The data set is the same for each number of them.

        Args:
            rank: of this process, from 0.
            world: number of shares.

        Returns:
            Number of parts that other ranks have yet to make; the data set is there when it is 0.
        """
        with suppress(OSError):  # for the record of the text's hashes; `build_once` says what is wrong
            self.cache_dir.mkdir(parents=True, exist_ok=True)
        settings = self._given_tokenizer, self._vocab_size_to_learn, self.val_fraction
        return TokenizedCorpus(self.corpus, self.folder, *settings).build(rank, world)

    def prepare_data(self) -> None:
        """Tokenize into the cache, and plan rows where asked for, unless that has been done."""
        self.prepare_shards()
        if self.row_plan is not None:
            self._plan_rows([self.open_source()])

    def open_source(self) -> Source:
        """Map the shards into memory and check that they fit the tokenizer, which is the given one from now on."""
        self.prepare_shards()  # for use without a Trainer; with one, the folder exists
        try:
            self.meta = json.loads((self.folder / "meta.json").read_text(encoding="utf-8"))
            tokenizer = load_tokenizer(self.folder / "tokenizer.json")
            splits = ("val",) if self.val_fraction == 1 else ("train", "val")
            streams = {split: TokenStream(sorted(self.folder.glob(f"{split}_*.bin"))) for split in splits}
            if tokenizer_sha256(tokenizer) != self.meta["tokenizer_sha256"]:
                raise UsageError("tokenizer.json did not write the shards")
            if any(len(stream) != self.meta[split]["tokens"] for split, stream in streams.items()):
                raise UsageError("shards are missing")
            corrections = ByteCorrections.load(self.folder)
        except (OSError, ValueError, KeyError, TypeError, EOFError) as error:  # UsageError is a ValueError
            raise UsageError(f"cache_dir: {self.folder} is damaged ({error}); delete that folder") from error
        self.vocab_size, self.eot_id = self.meta["vocab_size"], end_of_text(tokenizer)
        name = self._tokenizer_name or f"BPE of {self.vocab_size} tokens learned from {self.meta['source']}"
        self._given_tokenizer, self._tokenizer_name = tokenizer, name
        return Source(streams, self.folder.name, byte_corrections=corrections, seed=self.seed, row_plan=self.row_plan)

    def setup(self, stage: str | None = None) -> None:
        """Map the shards into memory and check them."""
        source = self.open_source()
        self.use([source], self._given_tokenizer, self._tokenizer_name)
        if self.val_fraction == 1:
            rank_zero_info(self.data_summary())

    def source_files(self, offsets: Sequence[int], source: int = 0) -> list[Path | None]:
        """The text file behind the tokens at these offsets of the training stream; reads the text up to the last.

        None for a Hugging Face dataset, and for text so long that to read it again would take minutes.
        """
        corpus = self.corpus
        if self.eot_id is None or corpus.n_bytes is None or corpus.n_bytes > SEARCHED_BYTES:
            return [None] * len(offsets)
        numbers = self.streams["train"].count_before(self.eot_id, offsets)
        files = training_files(corpus, self.val_fraction, set(numbers))
        return [files.get(number) for number in numbers]

    def data_summary(self) -> str:
        """One line on the data; after `setup`."""
        val = self.meta["val"]
        if (train := self.meta.get("train")) is None:
            return f"{self.corpus.description}: {val['bytes']:,} bytes, {val['tokens']:,} tokens"
        return (
            f"{self.corpus.description}: {train['documents'] + val['documents']:,} documents, "
            f"{(train['bytes'] + val['bytes']) / 1e6:.2f} MB; {train['tokens']:,} training and {val['tokens']:,} "
            f"validation tokens, {train['bytes'] / train['tokens']:.2f} bytes a token"
            f"{self.sources[0].plan_summary}; {self.folder}"
        )
