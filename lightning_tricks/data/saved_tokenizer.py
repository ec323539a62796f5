"""The tokenizer in a checkpoint: saved with the data's state, compared at every load, read back to generate text.

A model's weights are useless with another tokenizer, in which the same ids stand for other text.
"""

import hashlib
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from lightning_tricks._core.errors import UsageError
from lightning_tricks.checkpoints.check_checkpoint import TRAINER_STATE
from lightning_tricks.checkpoints.hf_folder import is_hf_folder, tokenizer_file
from lightning_tricks.checkpoints.open_checkpoint import open_checkpoint
from lightning_tricks.data.bpe import as_text_only, load_tokenizer


@dataclass(frozen=True)
class SavedTokenizer:
    """The tokenizer that a model was trained with.

    Args:
        tokenizer: of the `tokenizers` library.
        name: its file, or the text that it was learned from.
        eot_id: id of the token that ends a document; None if the data did not know it.
    """

    tokenizer: Tokenizer
    name: str
    eot_id: int | None

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without an end-of-text token; names of special tokens are encoded as plain text."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, without special tokens."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=True)


def tokenizer_sha256(tokenizer: Tokenizer) -> str:
    """Identity of a tokenizer, whichever file it was read from."""
    return hashlib.sha256(tokenizer.to_str().encode()).hexdigest()


def tokenizer_record(tokenizer: Tokenizer, name: str, eot_id: int | None) -> dict[str, Any]:
    """A tokenizer in plain types for a checkpoint: `json`, `sha256`, `name` and `eot_id`."""
    return {"name": name, "sha256": tokenizer_sha256(tokenizer), "eot_id": eot_id, "json": tokenizer.to_str()}


def tokenizer_from_checkpoint(checkpoint: dict[str, Any]) -> SavedTokenizer:
    """The tokenizer of a checkpoint that was trained on `TextData`, or on `TokenData` with its `tokenizer`.

    Args:
        checkpoint: as `torch.load` or `open_checkpoint` returns it.

    Raises:
        UsageError: the checkpoint holds no tokenizer.

    Example:
        >>> from lightning_tricks.data.bpe import train_bpe
        >>> record = tokenizer_record(train_bpe(["a story"], 257), "the story", eot_id=0)
        >>> tokenizer = tokenizer_from_checkpoint({"TextData": {"tokenizer": record}})
        >>> tokenizer.decode(tokenizer.encode("a story")), tokenizer.eot_id
        ('a story', 0)
    """
    record = find_record(checkpoint)
    if record is None:
        raise UsageError(
            "the checkpoint holds no tokenizer: it was trained on data that knew none; give the tokenizer's own file"
        )
    return SavedTokenizer(as_text_only(_from_json(record)), record["name"], record["eot_id"])


def _from_json(record: dict[str, Any]) -> Tokenizer:
    try:
        return Tokenizer.from_str(record["json"])
    except Exception as error:  # tokenizers raises bare Exception
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UsageError(
            f"the checkpoint's tokenizer {record['name']!r} is none of the tokenizers library ({reason})"
        ) from None


def find_record(checkpoint: dict[str, Any]) -> dict[str, Any] | None:
    """The `tokenizer_record` in the state of a checkpoint's data module, whatever the module's class; else None."""
    for state in checkpoint.values():
        record = state.get("tokenizer") if isinstance(state, dict) else None
        if isinstance(record, dict) and all(isinstance(record.get(name), str) for name in ("json", "name", "sha256")):
            return record
    return None


def check_same(saved: dict[str, Any], own: dict[str, Any]) -> None:
    """Refuse a checkpoint's tokenizer that is not the data's, with an error that names both."""
    # another version of `tokenizers` may write other JSON for the same tokenizer
    if own["sha256"] == saved["sha256"] or own["json"] == as_text_only(Tokenizer.from_str(saved["json"])).to_str():
        return
    theirs, ours = (f"{record['name']!r} (sha256 {record['sha256'][:8]})" for record in (saved, own))
    raise UsageError(
        f"tokenizer: the checkpoint was trained with {theirs}, the data has {ours}: "
        "give --data.tokenizer the checkpoint's path, which holds the right one, or start without the checkpoint"
    )


def open_tokenizer(option: str | None) -> tuple[Tokenizer | None, str]:
    """The tokenizer in a `tokenizer.json`, in a Hugging Face folder or in a checkpoint, and its name.

    None without an option.

    Raises:
        UsageError: the path is missing, or holds no tokenizer.
    """
    if option is None:
        return None, ""
    path = Path(option).expanduser()
    if is_hf_folder(path):
        return load_tokenizer(tokenizer_file(path)), str(path)
    file = path / TRAINER_STATE if path.is_dir() else path
    if not zipfile.is_zipfile(file):
        return load_tokenizer(path), str(path)
    try:
        content = open_checkpoint(path, parts=(), weights_only=True, verify=False)
        saved = tokenizer_from_checkpoint(content if isinstance(content, dict) else {})
    except UsageError as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"tokenizer={str(path)!r}: cannot be read from this checkpoint ({reason})") from error
    return saved.tokenizer, saved.name
