"""The tokenizer: nothing is lost, nothing can be injected, and bytes are counted right."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from lightning_tricks._core.errors import UsageError
from lightning_tricks.data.bpe import (
    END_OF_TEXT,
    byte_alphabet,
    end_of_text,
    load_tokenizer,
    token_texts,
    train_bpe,
    vocabulary_size,
)


@pytest.fixture(scope="module")
def tokenizer():
    return train_bpe(["the cat sat on the mat, the cat sat again\n", "def f(x):\n    return x\n"] * 3, 280)


@pytest.fixture(scope="module")
def texts(tokenizer):
    return token_texts(tokenizer)


@given(text=st.text())
@settings(max_examples=200)
def test_every_text_comes_back_byte_for_byte(tokenizer, texts, text):
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert b"".join(texts[i] for i in ids) == text.encode()
    assert tokenizer.decode(ids) == text


def test_the_text_of_a_special_token_is_text(tokenizer):
    for text in (END_OF_TEXT, f"see {END_OF_TEXT}here"):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert end_of_text(tokenizer) not in ids
        assert b"".join(token_texts(tokenizer)[i] for i in ids) == text.encode()


def test_the_vocabulary_is_as_large_as_asked_for_unless_the_text_is_too_small(tokenizer):
    assert end_of_text(tokenizer) == 0
    assert token_texts(tokenizer)[0] == b""
    assert vocabulary_size(tokenizer) == 280
    assert vocabulary_size(train_bpe(["ab"], 4096)) == 258  # 256 bytes, end-of-text, "ab"


def test_a_saved_tokenizer_is_the_same_one(tokenizer, tmp_path):
    tokenizer.save(str(tmp_path / "t.json"))
    loaded = load_tokenizer(tmp_path / "t.json")
    assert loaded.to_str() == tokenizer.to_str()
    assert 0 not in loaded.encode(END_OF_TEXT, add_special_tokens=False).ids


def test_a_tokenizer_that_cuts_or_pads_is_told_not_to(tokenizer, tmp_path):
    other = Tokenizer.from_str(tokenizer.to_str())
    other.enable_truncation(3)
    other.enable_padding(length=100)
    other.save(str(tmp_path / "t.json"))
    text = "the cat sat on the mat and much more"
    assert load_tokenizer(tmp_path / "t.json").encode(text).ids == tokenizer.encode(text).ids


def test_the_byte_alphabet_is_gpt_2_s():
    transformers = pytest.importorskip("transformers.convert_slow_tokenizer")
    assert byte_alphabet() == {char: byte for byte, char in transformers.bytes_to_unicode().items()}


def test_an_added_token_that_is_not_special_stands_for_its_text(tokenizer):
    other = Tokenizer.from_str(tokenizer.to_str())
    other.add_tokens([AddedToken("<tool_é>", special=False)])
    assert token_texts(other)[other.token_to_id("<tool_é>")] == "<tool_é>".encode()


def test_a_byte_level_decoder_inside_a_sequence_is_recognised(tokenizer):
    other = Tokenizer.from_str(tokenizer.to_str())
    other.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 0, 0)])
    assert token_texts(other) == token_texts(tokenizer)


def test_ids_with_gaps_need_the_largest_plus_one(tokenizer):
    spec = json.loads(tokenizer.to_str())
    spec["model"]["vocab"]["z" * 9] = 999
    gaps = Tokenizer.from_str(json.dumps(spec))
    assert vocabulary_size(gaps) == 1000
    assert len(token_texts(gaps)) == 1000


def test_a_tokenizer_that_is_not_byte_level_has_no_byte_lengths():
    words = Tokenizer(models.WordLevel({"a": 0, "</s>": 1}, unk_token="a"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    assert token_texts(words) is None
    assert end_of_text(words) == 1
    with pytest.raises(UsageError, match=r"no end-of-text token; add one of <\|endoftext\|>"):
        end_of_text(Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))


def test_a_tokenizer_file_that_is_none_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"none.json'.*No such file"):
        load_tokenizer(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(UsageError, match=r"bad.json': not a tokenizers JSON file \(.+\)$"):
        load_tokenizer(tmp_path / "bad.json")
