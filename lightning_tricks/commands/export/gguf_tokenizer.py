"""The tokenizer of a GGUF file: tokens, their types, merges, and the name that llama.cpp has for its pre-tokenizer.

llama.cpp compiles the regular expression of each pre-tokenizer in and chooses it by name. A tokenizer whose text is cut
at other places than those of a name would get other ids there, without an error: it is refused here.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_tricks._errors import UsageError
from lightning_tricks.data import SavedTokenizer
from lightning_tricks.data.bpe import byte_alphabet

# Types of tokens, as in `TokenType` of the package gguf
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5

_CASELESS_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"


def _words_and_digits(digits: str) -> str:
    """The pattern that the tokenizers of Llama 3 and Qwen 2 share, but for the length of their numbers."""
    parts = (
        _CASELESS_ENDINGS,
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        digits,
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
    return "|".join(parts)


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_NAMES = {  # by pattern, and by whether a word that is a token is taken whole before any merge
    (_GPT2, False): "gpt-2",
    (_words_and_digits(r"\p{N}{1,3}"), True): "llama-bpe",
    (_words_and_digits(r"\p{N}{1,3}"), False): "dbrx",
    (_words_and_digits(r"\p{N}"), False): "qwen2",
}


@dataclass(frozen=True)
class GGUFVocabulary:
    """What a GGUF file says about a byte-level BPE.

    Args:
        pre: llama.cpp's name of the pre-tokenizer.
        tokens: text of each token, by id; in the byte alphabet, but for added tokens.
        types: of each token.
        merges: pairs, joined by a space, in their order.
        eot_id: the token that ends a document and begins one; None: there is none.
    """

    pre: str
    tokens: list[str]
    types: list[int]
    merges: list[str]
    eot_id: int | None


def gguf_vocabulary(saved: SavedTokenizer, vocab_size: int) -> GGUFVocabulary:
    """The vocabulary of a tokenizer, filled up with unused tokens to the rows of the embedding.

    Args:
        saved: of the checkpoint.
        vocab_size: rows of the embedding.

    Raises:
        UsageError: llama.cpp cannot express the tokenizer; it has more tokens than the embedding has rows.
    """
    spec = json.loads(saved.tokenizer.to_str())
    pre = pre_tokenizer_name(spec, saved.name)
    texts = {number: token for token, number in saved.tokenizer.get_vocab(with_added_tokens=False).items()}
    types = dict.fromkeys(texts, NORMAL)
    for number, added in saved.tokenizer.get_added_tokens_decoder().items():
        texts[number], types[number] = added.content, CONTROL if added.special else USER_DEFINED
        if not added.special and (added.single_word or added.lstrip or added.rstrip):
            raise _refused(saved.name, f"its token {added.content!r} takes spaces or whole words alone")
    if max(texts) >= vocab_size:
        raise UsageError(
            f"export: the tokenizer {saved.name!r} has the id {max(texts)}, and decoder.vocab_size={vocab_size}: a "
            "GGUF file cannot have more tokens than the embedding has rows"
        )
    if saved.eot_id is not None and saved.eot_id not in texts:
        raise UsageError(f"export: the tokenizer {saved.name!r} has no token {saved.eot_id}, its end of text")
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in spec["model"]["merges"]]
    return GGUFVocabulary(
        pre=pre,
        tokens=[texts.get(number, f"[PAD{number}]") for number in range(vocab_size)],
        types=[types.get(number, UNUSED) for number in range(vocab_size)],
        merges=merges,
        eot_id=saved.eot_id,
    )


def pre_tokenizer_name(spec: Mapping[str, Any], name: str) -> str:
    """llama.cpp's name for the pre-tokenizer of a byte-level BPE.

    Args:
        spec: the tokenizer's JSON.
        name: of the tokenizer, for errors.

    Raises:
        UsageError: another kind of tokenizer, or a pre-tokenizer that llama.cpp has no name for.

    Source: `llama-vocab.cpp` of llama.cpp: the names, and the patterns from which its own are adapted.
    """
    model = spec["model"]
    if model.get("type") != "BPE":
        raise _refused(name, f"it is a {model.get('type')}, no BPE")
    for key in ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
        if model.get(key):
            raise _refused(name, f"its model has {key}")
    if spec.get("normalizer"):
        raise _refused(name, "it has a normalizer")
    if not byte_alphabet().keys() <= model["vocab"].keys():
        raise _refused(name, "some bytes are no tokens of it")
    pattern = _pattern(spec.get("pre_tokenizer") or {})
    found = _NAMES.get((pattern or "", bool(model.get("ignore_merges"))))
    if found is None:
        raise _refused(name, "llama.cpp has no name for its pre-tokenizer")
    return found


def _pattern(part: Mapping[str, Any]) -> str | None:
    """The regular expression by whose matches a pre-tokenizer cuts a text before its bytes are mapped; else None."""
    steps = part.get("pretokenizers", [part])
    last = steps[-1]
    if last.get("type") != "ByteLevel" or last["add_prefix_space"]:
        return None
    if len(steps) == 1:
        return _GPT2 if last["use_regex"] else None
    split = steps[0]
    if len(steps) > 2 or last["use_regex"] or split.get("type") != "Split":
        return None
    if split["behavior"] != "Isolated" or split["invert"]:
        return None
    pattern: str | None = split["pattern"].get("Regex")
    return pattern


def _refused(name: str, reason: str) -> UsageError:
    return UsageError(f"export: format=gguf: the tokenizer {name!r} cannot be one of llama.cpp ({reason}): give hf")
