"""Parts of `export --format gguf`: names of pre-tokenizers, kinds of tokens, order of rows, one tensor at a time."""

import json
import re
import weakref

import gguf
import numpy
import pytest
import torch
from commands.exported import SIZES, TEXT, VOCABULARY, tokenizer
from tokenizers import AddedToken, Regex, Tokenizer, pre_tokenizers

from lightning_tricks._core.errors import UsageError
from lightning_tricks.commands.export import gguf_file
from lightning_tricks.commands.export.folder_files import Entry
from lightning_tricks.data.tokenizer import SavedTokenizer, train_bpe
from lightning_tricks.models import Llama


def test_one_tensor_is_in_memory_at_a_time(tmp_path):
    built, alive = [], []

    def build():
        alive.append(sum(other() is not None for other in built))
        memory = numpy.zeros((280, 32), dtype=numpy.float32)  # lives as long as a view of it
        built.append(weakref.ref(memory))
        return torch.from_numpy(memory)

    entries = [Entry(f"tensor{number}", (280, 32), torch.float32, build) for number in range(4)]
    saved = SavedTokenizer(Tokenizer.from_str(tokenizer()["json"]), "a text", 0)
    vocabulary = gguf_file.gguf_vocabulary(saved, VOCABULARY)
    gguf_file.write_gguf(entries, Llama(**SIZES), vocabulary, "name", tmp_path / "model.gguf")
    assert alive == [0] * 4


# ---- pre-tokenizers

WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def cut_by(pattern, ignore_merges=False, **changed):
    """The JSON of a byte-level BPE that cuts by a pattern; with `changed` parts of its model."""
    trained = train_bpe([TEXT], VOCABULARY)
    trained.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    spec = json.loads(trained.to_str())
    spec["model"] |= {"ignore_merges": ignore_merges, **changed}
    return spec


def spec_with(**changed):
    return json.loads(train_bpe([TEXT], VOCABULARY).to_str()) | changed


def test_a_pre_tokenizer_that_llama_cpp_has_gets_its_name():
    for spec, name in (
        (spec_with(), "gpt-2"),
        (cut_by(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"), "gpt-2"),
        (cut_by(WORDS + r"\p{N}{1,3}" + REST, ignore_merges=True), "llama-bpe"),
        (cut_by(WORDS + r"\p{N}{1,3}" + REST), "dbrx"),
        (cut_by(WORDS + r"\p{N}" + REST), "qwen2"),
    ):
        assert gguf_file.pre_tokenizer_name(spec, "a text") == name


def test_any_other_is_refused_in_a_line():
    own = "llama.cpp has no name for its pre-tokenizer"
    inverted = cut_by(WORDS + r"\p{N}" + REST)
    inverted["pre_tokenizer"]["pretokenizers"][0]["invert"] = True
    removed = cut_by(WORDS + r"\p{N}" + REST)
    removed["pre_tokenizer"]["pretokenizers"][0]["behavior"] = "Removed"
    no_bytes = spec_with()
    del no_bytes["model"]["vocab"]["Ġ"]
    for spec, reason in (
        (spec_with(pre_tokenizer=BYTES | {"add_prefix_space": True}), own),
        (spec_with(pre_tokenizer=BYTES | {"use_regex": False}), own),
        (spec_with(pre_tokenizer={"type": "Whitespace"}), own),
        (spec_with(pre_tokenizer=None), own),
        (spec_with(pre_tokenizer={"type": "Sequence", "pretokenizers": [{"type": "Digits"}, BYTES]}), own),
        (cut_by(WORDS + r"\p{N}{1,2}" + REST), own),
        (cut_by(WORDS + r"\p{N}" + REST, ignore_merges=True), own),
        (inverted, own),
        (removed, own),
        (spec_with(normalizer={"type": "NFC"}), "it has a normalizer"),
        (cut_by(WORDS + r"\p{N}" + REST, byte_fallback=True), "its model has byte_fallback"),
        (cut_by(WORDS + r"\p{N}" + REST, end_of_word_suffix="</w>"), "its model has end_of_word_suffix"),
        (no_bytes, "some bytes are no tokens of it"),
        (spec_with(model={"type": "WordLevel", "vocab": {}, "unk_token": ""}), "it is a WordLevel, no BPE"),
    ):
        with pytest.raises(UsageError, match=re.escape(f"tokenizer 'a text' cannot be one of llama.cpp ({reason})")):
            gguf_file.pre_tokenizer_name(spec, "a text")


def test_added_tokens_keep_their_kind():
    trained = train_bpe([TEXT], VOCABULARY)
    trained.add_tokens([AddedToken("<think>")])
    trained.add_special_tokens(["<|im_start|>"])
    vocabulary = gguf_file.gguf_vocabulary(SavedTokenizer(trained, "a text", None), 290)
    assert vocabulary.tokens[279:283] == [trained.id_to_token(279), "<think>", "<|im_start|>", "[PAD282]"]
    assert vocabulary.types[279:283] == [1, 4, 3, 5]
    assert vocabulary.eot_id is None
    for size, eot_id, says in (
        (281, 0, "has the id 281, and decoder.vocab_size=281"),
        (290, 285, "has no token 285, its end of text"),
    ):
        with pytest.raises(UsageError, match=says):
            gguf_file.gguf_vocabulary(SavedTokenizer(trained, "a text", eot_id), size)
    trained.add_tokens([AddedToken("<word>", single_word=True)])
    with pytest.raises(UsageError, match="its token '<word>' takes spaces or whole words alone"):
        gguf_file.gguf_vocabulary(SavedTokenizer(trained, "a text", None), 290)


def test_types_of_tokens_are_those_of_the_package():
    for name in ("NORMAL", "CONTROL", "USER_DEFINED", "UNUSED"):
        assert getattr(gguf_file, name) == gguf.TokenType[name]
