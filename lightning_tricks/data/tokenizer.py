"""Train or load a tokenizer; the bytes behind each of its tokens; the tokenizer that a checkpoint holds.

Byte-level BPE: every text can be encoded, and is decoded to the same bytes. A model's weights are useless with another
tokenizer, in which the same ids stand for other text, so a checkpoint holds its own, which is compared at every load.
"""

import hashlib
import json
import sys
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from lightning_tricks._core.errors import UsageError
from lightning_tricks.checkpoints.bucket import local_copy
from lightning_tricks.checkpoints.check_checkpoint import TRAINER_STATE
from lightning_tricks.checkpoints.hf_folder import is_hf_folder, tokenizer_file
from lightning_tricks.checkpoints.open_checkpoint import open_checkpoint

END_OF_TEXT = "<|endoftext|>"


def _words_and_digits(digits: str) -> str:
    """The pattern that the tokenizers of Llama 3 and Qwen 2 share, but for the length of their numbers."""
    parts = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        digits,
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
    return "|".join(parts)


# the patterns whose matches are the pieces of a text: within a piece, bytes are merged
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3_PATTERN, QWEN2_PATTERN = _words_and_digits(r"\p{N}{1,3}"), _words_and_digits(r"\p{N}")
PATTERNS = (GPT2_PATTERN, LLAMA3_PATTERN, QWEN2_PATTERN)

_END_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>", "<|im_end|>")


def check_vocab_size(vocab_size: int) -> None:
    """Refuse fewer tokens than a tokenizer that is learned has from the start, and None, which a recipe may give."""
    if vocab_size is None or vocab_size < 257:
        raise UsageError(f"vocab_size={vocab_size}: 256 bytes and end-of-text need at least 257")


def train_bpe(documents: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learn a byte-level BPE with `<|endoftext|>` as its id 0 and no normalizer.

    Args:
        documents: the training part of the text.
        vocab_size: tokens to learn, at least 257 (the bytes and end-of-text); a small text may yield fewer.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator(documents, trainer)
    return as_text_only(tokenizer)


def load_tokenizer(path: Path) -> Tokenizer:
    """Read a `tokenizer.json`.

    Raises:
        UsageError: the file is missing or is not a tokenizer.
    """
    try:
        return as_text_only(Tokenizer.from_str(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise UsageError(f"tokenizer={str(path)!r}: cannot be read ({error.strerror}); check the path") from error
    except Exception as error:  # tokenizers raises bare Exception
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UsageError(f"tokenizer={str(path)!r}: not a tokenizers JSON file ({reason})") from error


def as_text_only(tokenizer: Tokenizer) -> Tokenizer:
    """Let the tokenizer encode the names of special tokens as plain text, without truncation or padding.

    A document that mentions `<|endoftext|>` must not end there.
    """
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def vocabulary_size(tokenizer: Tokenizer) -> int:
    """Largest id plus one: the rows that an embedding needs."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def end_of_text(tokenizer: Tokenizer) -> int:
    """Id of the token that ends a document.

    Raises:
        UsageError: the tokenizer has none of the usual ones.
    """
    for name in _END_NAMES:
        if (token := tokenizer.token_to_id(name)) is not None:
            return token
    raise UsageError(f"tokenizer: it has no end-of-text token; add one of {', '.join(_END_NAMES)} to it")


def byte_alphabet() -> dict[str, int]:
    """The byte behind each character of a byte-level BPE vocabulary, as GPT-2 chose them.

    A printable Latin-1 character stands for its own byte; the other bytes have the characters from 256 on, in order.

    Source: `bytes_to_unicode` in https://github.com/openai/gpt-2/blob/master/src/encoder.py.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    return alphabet | {chr(256 + number): byte for number, byte in enumerate(others)}


def not_plain(model: Mapping[str, Any]) -> str | None:
    """Why a tokenizer's model does more than to merge bytes by rules, such as `it is a Unigram, no BPE`; else None.

    Args:
        model: of the tokenizer's JSON.
    """
    if model.get("type") != "BPE":
        return f"it is a {model.get('type')}, no BPE"
    for key in ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
        if model.get(key):
            return f"its model has {key}"
    return None if byte_alphabet().keys() <= model["vocab"].keys() else "some bytes are no tokens of it"


def split_pattern(pre_tokenizer: Mapping[str, Any]) -> str | None:
    """The pattern by whose matches a byte-level pre-tokenizer cuts a text before its bytes are mapped; else None.

    Args:
        pre_tokenizer: of the tokenizer's JSON.
    """
    steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    last = steps[-1]
    if last.get("type") != "ByteLevel" or last["add_prefix_space"]:
        return None
    if len(steps) == 1:
        return GPT2_PATTERN if last["use_regex"] else None
    split = steps[0]
    if len(steps) > 2 or last["use_regex"] or split.get("type") != "Split":
        return None
    if split["behavior"] != "Isolated" or split["invert"]:
        return None
    pattern: str | None = split["pattern"].get("Regex")
    return pattern


def changes_text(tokenizer: Tokenizer) -> str | None:
    """Why the bytes behind the ids of a text may not be its own, such as `it has the normalizer NFC`; None: they are.

    Args:
        tokenizer: see `as_text_only`.
    """
    spec = json.loads(tokenizer.to_str())
    if token_texts(tokenizer) is None:
        return "it is not byte-level"
    if spec["normalizer"] is not None:
        return f"it has the normalizer {spec['normalizer']['type']}"
    if reason := not_plain(spec["model"]):
        return reason
    first = spec["pre_tokenizer"] or {}
    steps = first.get("pretokenizers", [first])
    kinds = [step.get("type") for step in steps]
    if kinds.count("ByteLevel") != 1:
        return "its pre-tokenizer does not map bytes once"
    for step, kind in zip(steps, kinds, strict=True):
        if step.get("add_prefix_space"):
            return "it adds a space before a text"
        if kind not in ("ByteLevel", "Split", "Digits", "Punctuation") or step.get("behavior") == "Removed":
            return f"its pre-tokenizer has {kind}"
    vocab = spec["model"]["vocab"]
    merged = {"".join(pair.split(" ") if isinstance(pair, str) else pair) for pair in spec["model"]["merges"]}
    alphabet = byte_alphabet()
    for token in tokenizer.get_added_tokens_decoder().values():
        if not token.special and (token.lstrip or token.rstrip):
            return f"its token {token.content!r} takes the spaces beside it"
        # one id for two texts: that of the added token, and that of the bytes of the same name
        own = bytes(alphabet.get(char, 0) for char in token.content) == token.content.encode() and not token.special
        made = spec["model"].get("ignore_merges") or token.content in merged or len(token.content) == 1
        if token.content in vocab and made and not own:
            return f"its token {token.content!r} also stands for bytes"
    return None


def token_texts(tokenizer: Tokenizer) -> list[bytes] | None:
    """The UTF-8 bytes of each token by id, empty for special tokens; None for a tokenizer that is not byte-level."""
    spec = json.loads(tokenizer.to_str())
    decoder = spec["decoder"] or {}
    if "ByteLevel" not in {part["type"] for part in decoder.get("decoders", [decoder]) if part}:
        return None
    alphabet = byte_alphabet()
    texts = [b""] * vocabulary_size(tokenizer)
    for token, number in tokenizer.get_vocab(with_added_tokens=False).items():
        if all(char in alphabet for char in token):
            texts[number] = bytes(alphabet[char] for char in token)
    for number, added in tokenizer.get_added_tokens_decoder().items():
        texts[number] = b"" if added.special else added.content.encode()
    return texts


# ---- in a checkpoint


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
        >>> from lightning_tricks.data.tokenizer import tokenizer_from_checkpoint, tokenizer_record, train_bpe
        >>> record = tokenizer_record(train_bpe(["a story"], 257), "the story", eot_id=0)
        >>> tokenizer_from_checkpoint({"TextData": {"tokenizer": record}}).eot_id
        0
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
    path = local_copy(option).expanduser()
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
