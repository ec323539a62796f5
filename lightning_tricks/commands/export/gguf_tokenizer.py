"""The tokenizer of a GGUF file: tokens, their types, merges, and the name that llama.cpp has for its pre-tokenizer.

llama.cpp compiles the regular expression of each pre-tokenizer in and chooses it by name. A tokenizer whose text is cut
at other places than those of a name would get other ids there, without an error: it is refused here.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_tricks._core.errors import UsageError
from lightning_tricks.data import SavedTokenizer
from lightning_tricks.data.tokenizer import GPT2_PATTERN, LLAMA3_PATTERN, QWEN2_PATTERN, not_plain, split_pattern

# Types of tokens, as in `TokenType` of the package gguf
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5

_NAMES = {  # by pattern, and by whether a word that is a token is taken whole before any merge
    (GPT2_PATTERN, False): "gpt-2",
    (LLAMA3_PATTERN, True): "llama-bpe",
    (LLAMA3_PATTERN, False): "dbrx",
    (QWEN2_PATTERN, False): "qwen2",
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
    if reason := not_plain(model):
        raise _refused(name, reason)
    if spec.get("normalizer"):
        raise _refused(name, "it has a normalizer")
    pattern = split_pattern(spec.get("pre_tokenizer") or {})
    found = _NAMES.get((pattern or "", bool(model.get("ignore_merges"))))
    if found is None:
        raise _refused(name, "llama.cpp has no name for its pre-tokenizer")
    return found


def _refused(name: str, reason: str) -> UsageError:
    return UsageError(f"export: format=gguf: the tokenizer {name!r} cannot be one of llama.cpp ({reason}): give hf")
