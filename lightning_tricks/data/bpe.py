"""Train or load a tokenizer, and know how many bytes each of its tokens stands for.

Byte-level BPE: every text can be encoded and comes back byte for byte.
"""

import json
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from lightning_tricks._errors import UsageError

END_OF_TEXT = "<|endoftext|>"
_END_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>", "<|im_end|>")


def train_bpe(documents: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learn a byte-level BPE with `<|endoftext|>` as its id 0 and no normalizer.

    Args:
        documents: the training part of the text.
        vocab_size: tokens to learn, at least 257 (the bytes and end-of-text); a small text may yield fewer.

    Returns:
        A tokenizer that decodes to exactly what was encoded.
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
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UsageError(f"tokenizer={str(path)!r}: not a tokenizers JSON file ({reason})") from error


def as_text_only(tokenizer: Tokenizer) -> Tokenizer:
    """Encode the names of special tokens as the plain text that they are, and cut or pad nothing.

    A document that talks about `<|endoftext|>` must not end there.
    """
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def vocabulary_size(tokenizer: Tokenizer) -> int:
    """Largest id plus one, which is what an embedding must hold."""
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
    """The character that byte-level BPE writes for each byte, as GPT-2 chose them.

    Printable Latin-1 stands for itself; the others take the characters from 256 on, in order.

    Source: `bytes_to_unicode` in https://github.com/openai/gpt-2/blob/master/src/encoder.py.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    return alphabet | {chr(256 + number): byte for number, byte in enumerate(others)}


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


def token_bytes(texts: list[bytes]) -> NDArray[np.int64]:
    """Length of each token in bytes, (vocab_size,) int64."""
    return np.array([len(text) for text in texts], dtype=np.int64)
