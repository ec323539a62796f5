"""Batches from existing token shards, in place: those of TextData and of other programs, local or behind a URL."""

import glob
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_tricks._core.errors import UsageError, check_choice
from lightning_tricks._host.address import default_cache_dir
from lightning_tricks.data.base import Source, TokenDataModule, TokenIdCheck
from lightning_tricks.data.packed_rows import Packing
from lightning_tricks.data.remote import BlockCache, file_size, find_remote
from lightning_tricks.data.shards import ByteCorrections, TokenStream, fingerprint
from lightning_tricks.data.shuffled_documents import Shuffle
from lightning_tricks.data.token_formats import File, ShardFormat, TokenDtype
from lightning_tricks.data.tokenizer import end_of_text, open_tokenizer, tokenizer_sha256, vocabulary_size

__all__ = ["TokenData"]


class TokenData(TokenDataModule):
    """Language-model batches from token files, in the same form as TextData's.

    A checkpoint knows its data by the shards' names, sizes and sampled contents (see `shards.fingerprint`); a resume
    with others says so in one line.

    Args:
        train: training shards: a path, a glob, or a URL such as s3://bucket/train_*.bin, of files or folders, or a list
            of them; the files of each are read in sorted order, or in that of an `index.json`.
        val: validation shards, likewise; None means no validation.
        tokenizer: the `tokenizers` JSON file that wrote them, or a checkpoint trained on them; with it,
            checkpoints hold the tokenizer, and validation batches have `n_bytes` unless it may change a text.
        vocab_size: smallest vocabulary of a model for these shards; None takes the tokenizer's.
        seq_len: tokens in a row.
        micro_batch_size: rows in a batch of one process.
        num_workers: processes that fetch batches.
        seed: of the order of the training rows.
        document_ids: add `document_ids` and `document_starts`, so that attention can stay within documents.
        eot_id: the end-of-text token; None takes the tokenizer's.
        shard_format: `auto` finds the format by an `index.json`, by llm.c's header, or by the index of Megatron or
            datatrove beside a file; `nanogpt` and `olmo` are bare ids, which nothing tells.
        skip_samples: training rows to pass over, as [first, last] sample positions, such as StepGuard names them.
        packing: `cut` cuts the training tokens every `seq_len`; `best_fit` plans rows in which no document is cut that
            fits a row, but for a few, with at most 0.5 % padding. It needs the end-of-text token.
        token_dtype: of ids whose files do not say it: `olmo`, MDS's `bytes`, and a `nanogpt` that is not uint16.
        cache_dir: folder for a plan of rows, and for blocks of remote files; None means
            $XDG_CACHE_HOME/lightning_tricks or ~/.cache/lightning_tricks.
        cache_gib: bound of the size of these blocks; the least recently read are dropped.
        shuffle: `rows` gives each epoch an order of the rows; `documents` also an order of the documents before they
            are cut into rows, so that a document has other neighbours in each epoch. It needs the end-of-text token, or
            files with an index of their documents.

    Raises:
        UsageError: bad options, no such shard, a shard that is cut or not what its header or index says, a bucket that
            refuses, ids or a tokenizer that do not fit.
    """

    def __init__(
        self,
        train: str | list[str],
        val: str | list[str] | None = None,
        tokenizer: str | None = None,
        vocab_size: int | None = None,
        seq_len: int = 1024,
        micro_batch_size: int = 8,
        num_workers: int = 0,
        seed: int = 0,
        document_ids: bool = False,
        eot_id: int | None = None,
        shard_format: ShardFormat = "auto",
        skip_samples: list[list[int]] | None = None,
        packing: Packing = "cut",
        token_dtype: TokenDtype | None = None,
        cache_dir: str | None = None,
        cache_gib: float = 64,
        shuffle: Shuffle = "rows",
    ) -> None:
        super().__init__(seq_len, micro_batch_size, num_workers, seed, document_ids, skip_samples, packing, shuffle)
        self.train, self.val = train, val
        self.shard_format, self.token_dtype = shard_format, token_dtype
        check_choice("shard_format", shard_format, ShardFormat)
        self.cache_dir = default_cache_dir() if cache_dir is None else Path(cache_dir).expanduser()
        self.cache_gib = cache_gib
        self._cache = BlockCache(self.cache_dir / "remote", cache_gib)
        self._given_tokenizer, self._tokenizer_name = open_tokenizer(tokenizer)
        self.vocab_size, self.eot_id = vocab_size, eot_id
        if self._given_tokenizer is not None:
            known = vocabulary_size(self._given_tokenizer)
            self.vocab_size = known if vocab_size is None else min(vocab_size, known)
            self.eot_id = end_of_text(self._given_tokenizer) if eot_id is None else eot_id

    def check_run(self, trainer: Any, datamodule: Any, stage: str) -> None:
        """Refuse shards that are not there."""
        _find("train", self.train, self._cache)
        if self.val is not None:
            _find("val", self.val, self._cache)

    def prepare_data(self) -> None:
        """Plan rows where asked for, unless that has been done."""
        if self.row_plan is not None:
            self._plan_rows([self.open_source()])

    def open_source(self) -> Source:
        """Map the shards into memory."""
        streams = self._streams()
        files = [(path.name, file_size(path)) for stream in streams.values() for path in stream.paths]
        names = hashlib.sha256(repr(files).encode()).hexdigest()[:16]
        content = fingerprint([path for stream in streams.values() for path in stream.paths])
        corrections = None if self.val is None else _byte_corrections(streams["val"].paths)
        return Source(streams, names, content, corrections, seed=self.seed, row_plan=self.row_plan)

    def setup(self, stage: str | None = None) -> None:
        """Map the shards into memory and check them."""
        self.use([self.open_source()], self._given_tokenizer, self._tokenizer_name)
        if self.vocab_size is not None:
            self.check_ids(self.vocab_size, "vocab_size")

    def check_sample(self, vocab_size: int | None) -> str:
        """Open the shards and compare their ids with the vocabularies; a line on them, for `check`.

        Args:
            vocab_size: of the model, above each id; None: not known.

        Raises:
            UsageError: shards that cannot be read, are too short for a row, or have other ids or another tokenizer.
        """
        streams = self._streams()
        self._check_length(streams["train"])
        for whose, bound in (("vocab_size", self.vocab_size), ("the model", vocab_size)):
            if bound is not None:
                TokenIdCheck().scan([streams], bound, whose)
        parts = [f"{len(stream):,} {name} tokens in {len(stream.paths)} shard(s)" for name, stream in streams.items()]
        tokenizer = "its tokenizer is not given" if self._given_tokenizer is None else "of the tokenizer given"
        return f"{' and '.join(parts)}{'' if 'val' in streams else ', no validation data'}; {tokenizer}"

    def _streams(self) -> dict[str, TokenStream]:
        """The shards of each split, opened."""
        streams = {"train": self._open("train", self.train)}
        if self.val is not None:
            streams["val"] = self._open("val", self.val)
        return streams

    def _open(self, option: str, patterns: str | list[str]) -> TokenStream:
        files = _find(option, patterns, self._cache)
        for folder in {file.parent for file in files if isinstance(file, Path)}:
            self._check_tokenizer(folder)
        return TokenStream(files, self.shard_format, self.token_dtype)

    def _check_tokenizer(self, folder: Path) -> None:
        """Compare the tokenizer with the one in the record that TextData writes beside its shards."""
        if self._given_tokenizer is None or not (folder / "meta.json").is_file():
            return
        whose, record = f"tokenizer={self._tokenizer_name!r}:", folder / "meta.json"
        try:
            recorded = json.loads(record.read_text(encoding="utf-8")).get("tokenizer_sha256", "")
        except (OSError, ValueError, AttributeError) as error:
            reason = f"{record} cannot be read as the record of TextData's shards ({error})"
            raise UsageError(f"{whose} {reason}; repair it or move it away") from error
        if recorded not in ("", tokenizer_sha256(self._given_tokenizer)):
            raise UsageError(f"{whose} it did not write the shards in {folder}; use {folder / 'tokenizer.json'}")


def holds_tokens(path: str) -> bool:
    """Whether a path or glob names token shards or a folder of them, and no text."""
    found = [Path(path), *Path(path).glob("*")]
    return any(file.suffix in (".bin", ".npy", ".ds") or file.name == "index.json" for file in found)


def _byte_corrections(paths: list[File]) -> NDArray[np.int64] | None:
    """Those beside the shards, where these are the whole validation part of a folder that TextData wrote."""
    folder = paths[0].parent
    if isinstance(folder, str) or not (folder / "meta.json").is_file() or paths != sorted(folder.glob("val_*.bin")):
        return None
    try:
        return ByteCorrections.load(folder)
    except (OSError, ValueError, EOFError) as error:
        raise UsageError(f"val: {folder / ByteCorrections.FILE} is damaged ({error}); delete that file") from error


def _find(option: str, patterns: str | list[str], cache: BlockCache) -> list[File]:
    """The files of paths, globs and URLs, each one's sorted, with those of folders in place of folders.

    Raises:
        UsageError: a pattern matches nothing.
    """
    files = list[File]()
    for pattern in [patterns] if isinstance(patterns, str | os.PathLike) else patterns:
        before = len(files)
        if "://" in str(pattern):
            files += find_remote(str(pattern), cache, _shards_of)
        else:
            path = str(Path(pattern).expanduser())
            # a file's own name may have brackets, which a glob reads as a set of characters
            for found in map(Path, [path] if os.path.exists(path) else sorted(glob.glob(path, recursive=True))):
                files += _shards_of(sorted(found.iterdir())) if found.is_dir() else [found]
        if len(files) == before:
            raise UsageError(f"{option}={str(pattern)!r}: matches no file; check the path")
    return files


def _shards_of(folder: Sequence[File]) -> list[File]:
    """Of the files of a folder, its `index.json`, else those whose ending is that of tokens.

    Raises:
        UsageError: some are for training and some for validation.
    """
    indexes = [file for file in folder if file.name == "index.json"]
    found = indexes or [file for file in folder if file.name.endswith((".bin", ".ds", ".npy"))]
    if len({file.name[:3] for file in found} & {"tra", "val"}) == 2:
        raise UsageError(
            f"{found[0].parent}: it has shards for training and validation; name some by a glob: train_*.bin"
        )
    return found
