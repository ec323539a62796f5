"""The fast encoder: it has the ids of the tokenizer, or leaves the text to it."""

import json
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from lightning_tricks.data import text_encoder
from lightning_tricks.data.text_encoder import encode_all, fast_bpe, merge_ranks
from lightning_tricks.data.tokenizer import LLAMA3_PATTERN, QWEN2_PATTERN, as_text_only, train_bpe

pytest.importorskip("tiktoken")

TEXTS = (
    "The cat sat on the mat, they're 1234 cats; it's 'late'\n\n  and we'll see  \n",
    "def f(x):\n        return x ** 2  # naïve café, Ωmega\r\n\r\n\tdone!!",
    "漢字かな交じり文、1\uff12\uff13\uff14\u0663\u0664 😀😀 ... \u00a0\u2003 x\u0301 e\u0301",
)


def with_pattern(tokenizer, pattern, **changes):
    """The tokenizer, cutting its text as Llama 3 or Qwen 2."""
    spec = json.loads(tokenizer.to_str()) | changes
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    spec["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, byte_level]}
    return as_text_only(Tokenizer.from_str(json.dumps(spec)))


def with_model(tokenizer, **changes):
    spec = json.loads(tokenizer.to_str())
    spec["model"] |= changes
    return as_text_only(Tokenizer.from_str(json.dumps(spec)))


def all_splits(tokenizer):
    """The form in which Llama 3's is published: a rule for each split of a token, pieces taken whole."""
    vocab = json.loads(tokenizer.to_str())["model"]["vocab"]
    rules = []
    for token in list(vocab)[257:]:
        splits = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        rules += [list(split) for split in splits if vocab.keys() >= set(split)]
    return with_model(tokenizer, merges=rules, ignore_merges=True)


@pytest.fixture(scope="module")
def plain():
    return train_bpe(TEXTS * 3, 420)


@pytest.fixture(scope="module")
def encoders(plain):
    """Tokenizers of each known form, each with its fast encoder."""
    forms = {
        "gpt2": plain,
        "llama3": all_splits(with_pattern(plain, LLAMA3_PATTERN)),
        "qwen2": with_pattern(plain, QWEN2_PATTERN, normalizer={"type": "NFC"}),
    }
    return {name: (tokenizer, fast_bpe(tokenizer)) for name, tokenizer in forms.items()}


def by_tokenizers(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False).ids


PARTS = [
    "'s", "'LL", " ", "  ", "\n", "\r\n", "\t", "12345", "the", "Cat", "é", "e\u0301", "\u017f", "漢", "😀", "\x1c",
    "!!", "<|endoftext|>",
]  # fmt: skip


@pytest.mark.parametrize("name", ["gpt2", "llama3", "qwen2"])
@settings(max_examples=100, deadline=None)
@given(parts=st.lists(st.one_of(st.sampled_from(PARTS), st.text(max_size=5)), max_size=30))
def test_the_ids_are_those_of_the_tokenizer(encoders, name, parts):
    tokenizer, fast = encoders[name]
    text = "".join(parts)
    ids = fast.encode(text)
    assert ids is None or ids.tolist() == by_tokenizers(tokenizer, text)


@pytest.mark.parametrize("name", ["gpt2", "llama3", "qwen2"])
def test_ordinary_text_is_taken(encoders, name):
    for text in TEXTS:
        assert encoders[name][1].encode(text) is not None


def test_a_run_of_one_character_is_encoded_however_long(plain, monkeypatch):
    monkeypatch.setattr(text_encoder, "_COMPARED", 100)
    longest, fast = text_encoder._LONGEST_SPACE, fast_bpe(plain)
    left = {f"x{' ' * longest}y", "\t" * 1_000_000}
    texts = [TEXTS[0], f"x{' ' * (longest - 1)}y", "a" * longest, *sorted(left)]
    for text, ids in encode_all(plain, texts):
        assert ids.tolist() == by_tokenizers(plain, text)
        assert (fast.encode(text) is None) == (text in left)


def test_a_character_that_is_classed_differently_is_left_to_the_tokenizer(plain, monkeypatch):
    wrong = r"'s|'t|'re|'ve|'m|'ll|'d| ?[\p{L}\x{1F600}]+| ?\p{N}+| ?[^\s\p{L}\p{N}\x{1F600}]+|\s+(?!\S)|\s+"
    monkeypatch.setattr(text_encoder, "split_pattern", lambda spec: wrong)
    monkeypatch.setattr(text_encoder, "PATTERNS", (wrong,))
    fast = fast_bpe(plain)
    assert fast.encode("a \U0001f600 b") is None
    assert fast.encode("a \U0001f601 b") is not None
    assert fast.encode("a b") is not None


def test_a_pattern_that_cuts_ascii_differently_takes_no_text(plain, monkeypatch):
    wrong = r" ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    monkeypatch.setattr(text_encoder, "split_pattern", lambda spec: wrong)
    monkeypatch.setattr(text_encoder, "PATTERNS", (wrong,))
    fast = fast_bpe(plain)
    assert [fast.encode(text) for text in TEXTS] == [None] * len(TEXTS)


def test_an_added_token_that_is_not_special_is_left_to_the_tokenizer(plain):
    tokenizer = Tokenizer.from_str(plain.to_str())
    tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    fast = fast_bpe(as_text_only(tokenizer))
    assert fast.encode("a <tool> b") is fast.encode("é <tool>") is None
    assert fast.encode("a < tool> b") is not None


def test_rules_out_of_order_are_ranked_by_their_order_and_not_by_id(plain):
    model = json.loads(plain.to_str())["model"]
    ids = np.random.default_rng(0).permutation(len(model["vocab"])).tolist()
    shuffled = with_model(plain, vocab=dict(zip(model["vocab"], ids, strict=True)))
    fast = fast_bpe(shuffled)
    for text in TEXTS:
        assert fast.encode(text).tolist() == by_tokenizers(shuffled, text)


def test_a_token_that_no_rules_make_is_never_given(plain):
    # ab is made first, so abc = a + bc never is
    vocab = json.loads(train_bpe(["x"], 257).to_str())["model"]["vocab"] | {"ab": 257, "bc": 258, "abc": 259}
    tokenizer = with_model(plain, vocab=vocab, merges=[["a", "b"], ["b", "c"], ["a", "bc"]])
    assert b"abc" not in merge_ranks(tokenizer)
    assert fast_bpe(tokenizer).encode("abc").tolist() == by_tokenizers(tokenizer, "abc") == [257, vocab["c"]]


def test_rules_that_tiktoken_cannot_follow_are_refused(plain):
    vocab = json.loads(train_bpe(["x"], 257).to_str())["model"]["vocab"] | {"ab": 257, "bc": 258, "abc": 259}
    # tiktoken would join ab + c, for which there is no rule; it knows one rank a token, and abc has two here
    whole = with_model(plain, vocab=vocab, merges=[["a", "b"], ["b", "c"], ["a", "bc"]], ignore_merges=True)
    apart = with_model(plain, vocab=vocab, merges=[["a", "bc"], ["b", "c"], ["ab", "c"], ["a", "b"]])
    assert merge_ranks(whole) is merge_ranks(apart) is None
    assert fast_bpe(whole) is None


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "Lowercase"}},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}},
        {"pre_tokenizer": None},
    ],
)
def test_another_kind_of_tokenizer_has_no_fast_encoder(plain, change):
    spec = json.loads(plain.to_str()) | change
    assert fast_bpe(as_text_only(Tokenizer.from_str(json.dumps(spec)))) is None


@pytest.mark.parametrize("version", [None, "0.12.0"])
def test_without_tiktoken_or_with_an_old_one_tokenizers_encodes(plain, monkeypatch, version):
    if version is None:
        monkeypatch.setitem(sys.modules, "tiktoken", None)
    else:
        monkeypatch.setattr("tiktoken.__version__", version)
    assert fast_bpe(plain) is None
    monkeypatch.setattr(text_encoder, "_COMPARED", 100)
    documents = [*TEXTS, *TEXTS]
    assert [text for text, _ in encode_all(plain, documents)] == documents


def test_documents_keep_their_order_and_each_has_its_ids(plain, monkeypatch):
    monkeypatch.setattr(text_encoder, "_COMPARED", 100)
    monkeypatch.setattr(text_encoder, "_TASK", 50)
    documents = [f"{TEXTS[number % 3]} document {number}" for number in range(300)]
    found = list(encode_all(plain, iter(documents)))
    assert [text for text, _ in found] == documents
    assert all(ids.tolist() == by_tokenizers(plain, text) for text, ids in found)


def test_a_document_with_other_ids_ends_the_use_of_tiktoken(plain, monkeypatch):
    monkeypatch.setattr(text_encoder, "_COMPARED", 100)
    taken = []

    def wrong(self, document):
        taken.append(document)
        return np.array([1, 2, 3])

    monkeypatch.setattr(text_encoder.FastBPE, "encode", wrong)
    found = list(encode_all(plain, [TEXTS[0] * 3, *TEXTS]))
    assert taken == [TEXTS[0] * 3]
    assert all(ids.tolist() == by_tokenizers(plain, text) for text, ids in found)


def test_a_short_text_needs_no_fast_encoder(plain, monkeypatch):
    monkeypatch.setattr(text_encoder, "fast_bpe", lambda tokenizer: pytest.fail("it was built"))
    assert [text for text, _ in encode_all(plain, TEXTS)] == list(TEXTS)
    assert list(encode_all(plain, [])) == []
