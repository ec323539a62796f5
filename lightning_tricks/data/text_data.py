"""Batches from text, which is tokenized once into a cache and then read by position."""

import hashlib
import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from lightning_tricks._errors import UsageError
from lightning_tricks.data.base import ShardData
from lightning_tricks.data.bpe import end_of_text, load_tokenizer, vocabulary_size
from lightning_tricks.data.cache import build_once, default_cache_dir
from lightning_tricks.data.corpus import Corpus, hugging_face, standard_library, text_files
from lightning_tricks.data.saved_tokenizer import open_tokenizer, tokenizer_sha256
from lightning_tricks.data.stream import TokenStream
from lightning_tricks.data.tokenize import FORMAT_VERSION, tokenize_corpus, training_files

LARGEST_VOCABULARY = 2**24  # to learn: sixty times the largest of a published model
SEARCHED_BYTES = 4_000_000_000  # of text, in which the file of a document is looked for


class TextData(ShardData):
    """Language-model batches from text; without arguments, from Python's standard library, which every machine has.

    `prepare_data` learns a byte-level BPE from the training documents (or takes yours), encodes each document followed
    by an end-of-text token, and writes shards into the cache, where a second run finds them. If it is killed, no
    incomplete data set is left. Documents are held out for validation by their hash.

    Training batches are `input_ids` and `labels`, (micro_batch_size, seq_len) int64, `labels[:, t]` being the token
    after `input_ids[:, t]`. They are addressed by position: a step has the same rows whatever the number of workers,
    in a resumed run too, and for every split of the same global batch into processes and accumulated micro-batches.
    Validation batches cover every validation token but the first once, -100 marks labels that do not count, and
    `n_bytes` gives the bytes behind those that do.

    Args:
        files: a path, folder or glob, or a list of them: .jsonl and .parquet (each row is a document), .txt and any
            other UTF-8 text; .gz too. None means the Python standard library's sources without its tests.
        hf_dataset: a Hugging Face dataset instead, `owner/name` or `owner/name:config`; its train split is streamed.
        text_field: the key or column that holds the text in .jsonl, .parquet and datasets.
        tokenizer: a `tokenizers` JSON file, or a checkpoint, which holds its own; None learns a byte-level BPE.
        vocab_size: tokens to learn when no tokenizer is given; after `setup`, the attribute is the tokenizer's size.
        seq_len: tokens in a row.
        micro_batch_size: rows in a batch of one process.
        val_fraction: share of the documents held out.
        num_workers: processes that fetch batches; 0 is enough if the shards fit into memory.
        seed: of the order of the training rows.
        document_ids: add `document_ids`, so that attention can stay within documents.
        cache_dir: folder for the shards; None means $XDG_CACHE_HOME/lightning_tricks or ~/.cache/lightning_tricks.
        skip_samples: training rows to pass over, as [first, last] sample positions, such as StepGuard names them.

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
    ) -> None:
        super().__init__(seq_len, micro_batch_size, num_workers, seed, document_ids, skip_samples)
        if files is not None and hf_dataset is not None:
            raise UsageError(f"files={files!r} and hf_dataset={hf_dataset!r}: give one of them")
        if not 0 < val_fraction < 1:
            raise UsageError(f"val_fraction={val_fraction}: it must lie between 0 and 1")
        if tokenizer is None and vocab_size < 257:
            raise UsageError(f"vocab_size={vocab_size}: 256 bytes and end-of-text need at least 257")
        if tokenizer is None and vocab_size > LARGEST_VOCABULARY:
            raise UsageError(f"vocab_size={vocab_size}: at most {LARGEST_VOCABULARY} tokens are learned: give less")
        self.files = [files] if isinstance(files, str) else files
        if self.files == []:
            raise UsageError("files=[]: name at least one, or leave it out for the standard library")
        self.hf_dataset, self.text_field, self.val_fraction = hf_dataset, text_field, val_fraction
        self.cache_dir = default_cache_dir() if cache_dir is None else Path(cache_dir).expanduser()
        self._given_tokenizer, self._tokenizer_name = open_tokenizer(tokenizer)
        self._vocab_size_to_learn = vocab_size
        self.vocab_size = vocab_size if self._given_tokenizer is None else vocabulary_size(self._given_tokenizer)
        self.meta: dict[str, Any] = {}

    @cached_property
    def _corpus(self) -> Corpus:
        if self.hf_dataset is not None:
            return hugging_face(self.hf_dataset, self.text_field)
        return standard_library() if self.files is None else text_files(self.files, self.text_field)

    def check_run(self, trainer: Any, datamodule: Any, stage: str) -> None:
        """Refuse text that is not there, a library that is missing, and sizes that this host cannot hold."""
        super().check_run(trainer, datamodule, stage)
        _ = self._corpus

    @cached_property
    def folder(self) -> Path:
        """The folder for the shards of exactly this text, tokenizer and split; `prepare_data` makes it."""
        given = self._given_tokenizer
        tokenizer = self._vocab_size_to_learn if given is None else tokenizer_sha256(given)
        key = repr((FORMAT_VERSION, self._corpus.fingerprint, tokenizer, self.val_fraction))
        return self.cache_dir / f"text-{hashlib.sha256(key.encode()).hexdigest()[:16]}"

    def prepare_data(self) -> None:
        """Tokenize into the cache, unless that has been done."""
        settings = self._given_tokenizer, self._vocab_size_to_learn, self.val_fraction
        build_once(self.folder, lambda folder: tokenize_corpus(self._corpus, folder, *settings))

    def setup(self, stage: str | None = None) -> None:
        """Map the shards into memory and check that they fit the tokenizer."""
        self.prepare_data()  # for use without a Trainer; with one, the folder exists
        try:
            self.meta = json.loads((self.folder / "meta.json").read_text(encoding="utf-8"))
            tokenizer = load_tokenizer(self.folder / "tokenizer.json")
            streams = {split: TokenStream(sorted(self.folder.glob(f"{split}_*.bin"))) for split in ("train", "val")}
            if tokenizer_sha256(tokenizer) != self.meta["tokenizer_sha256"]:
                raise UsageError("tokenizer.json did not write the shards")
            if any(len(stream) != self.meta[split]["tokens"] for split, stream in streams.items()):
                raise UsageError("shards are missing")
        except (OSError, ValueError, KeyError, TypeError) as error:  # UsageError is a ValueError
            raise UsageError(f"cache_dir: {self.folder} is damaged ({error}); delete that folder") from error
        self.vocab_size, self.eot_id = self.meta["vocab_size"], end_of_text(tokenizer)
        name = self._tokenizer_name or f"BPE of {self.vocab_size} tokens learned from {self.meta['source']}"
        self.use(streams, tokenizer, self.folder.name, name)

    def source_files(self, positions: Sequence[int]) -> list[Path | None]:
        """The text file behind each position of the training stream; reads the text up to the last of them.

        None for a Hugging Face dataset, and for text so long that to read it again would take minutes.
        """
        corpus = self._corpus
        if self.eot_id is None or corpus.n_bytes is None or corpus.n_bytes > SEARCHED_BYTES:
            return [None] * len(positions)
        numbers = self.streams["train"].count_before(self.eot_id, positions)
        files = training_files(corpus, self.val_fraction, set(numbers))
        return [files.get(number) for number in numbers]

    def data_summary(self) -> str:
        """One line on the training data; after `setup`."""
        train, val = self.meta["train"], self.meta["val"]
        return (
            f"{self.meta['source']}: {train['documents'] + val['documents']:,} documents, "
            f"{(train['bytes'] + val['bytes']) / 1e6:.2f} MB; {train['tokens']:,} training and {val['tokens']:,} "
            f"validation tokens, {train['bytes'] / train['tokens']:.2f} bytes a token; {self.folder}"
        )
