"""A whole text as validation rows: each byte of it counts once, for the bits per byte of a checkpoint on any text."""

import hashlib
import json
from collections import deque
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import numpy as np

from lightning_tricks._errors import UsageError
from lightning_tricks._lightning import rank_zero_info
from lightning_tricks.data.base import ShardData
from lightning_tricks.data.bpe import end_of_text, token_texts, vocabulary_size
from lightning_tricks.data.corpus import Corpus, expand, is_rows, read_pieces, read_rows, text_files
from lightning_tricks.data.saved_tokenizer import open_tokenizer, tokenizer_sha256
from lightning_tricks.data.shards import ByteCorrections, ShardWriter, TokenStream
from lightning_tricks.data.text_data import build_once, default_cache_dir
from lightning_tricks.data.text_encoder import encode_all

FORMAT_VERSION = 1  # part of the cache key: raise it when the same text gives other files
PIECE = 1 << 22  # characters encoded at once; a longer document is cut after blank lines, without a token between


class WholeText(ShardData):
    """Validation rows of a whole text, which is encoded by the tokenizer of a checkpoint; there is no training part.

    A file is a document, or each row of a .jsonl or .parquet file. Documents follow each other, each after an
    end-of-text token, whose own label does not count: the first token of the text is predicted from it. Rows stand side
    by side as in TextData's validation, so the figure compares with `val/bits_per_byte` of training.

    Args:
        files: a path, folder or glob, as TextData takes it.
        checkpoint: that holds the tokenizer, or the tokenizer's own file.
        seq_len: tokens in a row.
        micro_batch_size: rows in a batch of one process.
        num_workers: processes that fetch batches.
        document_ids: add `document_ids`, so that attention can stay within documents.
        text_field: the key or column that holds the text in .jsonl and .parquet.
        cache_dir: folder for the shards; None means $XDG_CACHE_HOME/lightning_tricks or ~/.cache/lightning_tricks.

    Raises:
        UsageError: text that cannot be read, a tokenizer that is missing, not byte-level or without an end of text.
    """

    def __init__(
        self,
        files: str,
        checkpoint: str,
        seq_len: int,
        micro_batch_size: int,
        num_workers: int = 0,
        document_ids: bool = False,
        text_field: str = "text",
        cache_dir: Path | None = None,
    ) -> None:
        super().__init__(seq_len, micro_batch_size, num_workers, 0, document_ids, None)
        self.files, self.text_field, self.cache_dir = files, text_field, cache_dir or default_cache_dir()
        found, self._tokenizer_name = open_tokenizer(checkpoint)
        assert found is not None  # a path was given
        self._known, self.vocab_size = found, vocabulary_size(found)
        self.eot_id: int = end_of_text(found)
        if token_texts(found) is None:
            raise UsageError(f"text={files!r}: bits per byte need a byte-level tokenizer, and {checkpoint} has another")

    @cached_property
    def _corpus(self) -> Corpus:
        return text_files([self.files], self.text_field)

    def check_run(self, trainer: object, datamodule: object, stage: str) -> None:
        """Refuse text that is not there, a library that is missing, and sizes that this host cannot hold."""
        super().check_run(trainer, datamodule, stage)
        _ = self._corpus

    @cached_property
    def folder(self) -> Path:
        """The folder for the shards of exactly this text and tokenizer; `prepare_data` makes it."""
        identity = self._corpus.identity(self.cache_dir, True)
        key = repr((FORMAT_VERSION, "whole", identity, tokenizer_sha256(self._known)))
        return self.cache_dir / f"text-{hashlib.sha256(key.encode()).hexdigest()[:16]}"

    def prepare_data(self) -> None:
        """Tokenize into the cache, unless that has been done."""
        build_once(self.folder, self._write)

    def _write(self, folder: Path) -> None:
        n_bytes = 0
        ends: deque[bool] = deque()  # of the pieces that are read and not yet written

        def texts() -> Iterator[str]:
            for text, end in self._pieces():
                ends.append(end)
                yield text

        corrections = ByteCorrections(folder, token_texts(self._known))
        with ShardWriter(folder, "val", self.vocab_size) as writer:
            writer.append(np.array([self.eot_id]))
            for text, ids in encode_all(self._known, texts()):
                writer.append(np.append(ids, self.eot_id) if ends.popleft() else ids)
                n_bytes += (size := len(text.encode()))
                corrections.add(ids, size, max(writer.tokens - 1, 1))  # the first token is no label
        corrections.save()
        (folder / "meta.json").write_text(json.dumps({"bytes": n_bytes}), encoding="utf-8")

    def _pieces(self) -> Iterator[tuple[str, bool]]:
        """The text in order, and whether a document ends after each part."""
        for path in expand([self.files]):
            if is_rows(path):
                yield from ((row, True) for row in read_rows(path, self.text_field))
                continue
            before = None
            for piece in read_pieces(path, PIECE):
                if before is not None:
                    yield before, False
                before = piece
            if before is not None:
                yield before, True

    def setup(self, stage: str | None = None) -> None:
        """Map the shards into memory and check that they fit the tokenizer."""
        self.prepare_data()  # for use without a Trainer; with one, the folder exists
        try:
            stream = TokenStream(sorted(self.folder.glob("val_*.bin")))
            self.n_bytes = json.loads((self.folder / "meta.json").read_text(encoding="utf-8"))["bytes"]
            corrections = ByteCorrections.load(self.folder)
        except (OSError, ValueError, KeyError, TypeError, EOFError) as error:  # UsageError is a ValueError
            raise UsageError(f"cache_dir: {self.folder} is damaged ({error}); delete that folder") from error
        self.use({"val": stream}, self._known, self.folder.name, self._tokenizer_name, byte_corrections=corrections)
        rank_zero_info(self.data_summary())

    def data_summary(self) -> str:
        """One line on the text; after `setup`."""
        return f"{self._corpus.description}: {self.n_bytes:,} bytes, {len(self.streams['val']):,} tokens"
