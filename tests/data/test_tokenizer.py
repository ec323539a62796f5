"""The tokenizer: nothing is lost, bytes are counted right, and a checkpoint holds the one of its weights.

A checkpoint is refused under another one.
"""

import doctest
import json

import lightning.pytorch as pl
import pytest
import torch
from harness.models import Small
from harness.runs import trainer_with
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from lightning_tricks import LanguageModel, Llama
from lightning_tricks._core.errors import UsageError
from lightning_tricks.checkpoints import AtomicCheckpointIO
from lightning_tricks.data import TextData, TokenData, tokenizer_from_checkpoint
from lightning_tricks.data import tokenizer as module
from lightning_tricks.data.tokenizer import (
    END_OF_TEXT,
    byte_alphabet,
    check_same,
    end_of_text,
    load_tokenizer,
    token_texts,
    tokenizer_record,
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


def test_a_tokenizer_that_cuts_or_pads_is_told_not_to(tokenizer, tmp_path):
    other = Tokenizer.from_str(tokenizer.to_str())
    other.enable_truncation(3)
    other.enable_padding(length=100)
    other.save(str(tmp_path / "t.json"))
    loaded = load_tokenizer(tmp_path / "t.json")
    text = "the cat sat on the mat and much more"
    assert loaded.encode(text).ids == tokenizer.encode(text).ids
    assert 0 not in loaded.encode(END_OF_TEXT, add_special_tokens=False).ids


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


# ---- in a checkpoint

STAGES = ("fit", "validate", "test", "predict")


def foreign() -> Small:
    """A module that knows nothing of ours."""
    return Small(net=torch.nn.Embedding(400, 1), loss=lambda module, batch: module(batch["input_ids"]).mean())


def trainer(**options) -> pl.Trainer:
    limits = {f"limit_{name}_batches": 1 for name in ("val", "test", "predict")}
    return trainer_with(**{"max_steps": 2, "num_sanity_val_steps": 0, "logger": False, **limits, **options})


def language_model() -> LanguageModel:
    return LanguageModel(Llama(vocab_size=400, d_model=8, n_layers=1, n_heads=2, max_seq_len=16))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A text, and two tokenizers of equal size that split it in other ways."""
    folder = tmp_path_factory.mktemp("tokenizers")
    (folder / "story.txt").write_text("\n\n".join(f"Paragraph {n} of a story of the sea." for n in range(400)))
    for name, text in (("ship", "the ship sailed on the sea and the wind blew"), ("moon", "moonlight over old rooms")):
        train_bpe([f"{text} {n}" for n in range(100)], 280).save(str(folder / f"{name}.json"))
    return folder


@pytest.fixture(scope="module")
def text(folder):
    """TextData on the story, with the named tokenizer or with one that is learned."""

    def build(name: str | None = None, **options) -> TextData:
        tokenizer = {} if name is None else {"tokenizer": str(folder / name)}
        options = {"vocab_size": 300, "seq_len": 16, "micro_batch_size": 2, "val_fraction": 0.2} | tokenizer | options
        return TextData(str(folder / "story.txt"), cache_dir=str(folder / "cache"), **options)

    return build


def train(model: pl.LightningModule, data: pl.LightningDataModule, path: str) -> str:
    run = trainer()
    run.fit(model, data)
    run.save_checkpoint(path)
    return path


@pytest.fixture(scope="module")
def checkpoint(folder, text) -> str:
    """Of a foreign module, trained on the ship's tokens."""
    return train(foreign(), text("ship.json"), str(folder / "ship.ckpt"))


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_refuses_another_tokenizer_and_names_both(stage, text, checkpoint, folder):
    with pytest.raises(UsageError) as caught:
        getattr(trainer(max_steps=4), stage)(foreign(), datamodule=text("moon.json"), ckpt_path=checkpoint)
    message = str(caught.value)
    assert f"trained with '{folder}/ship.json' (sha256 " in message
    assert f"the data has '{folder}/moon.json' (sha256 " in message
    assert "give --data.tokenizer the checkpoint's path" in message
    assert "\n" not in message


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_goes_on_with_the_same_one_and_with_the_checkpoints_own(stage, text, checkpoint):
    for data in (text("ship.json"), text(tokenizer=checkpoint)):
        getattr(trainer(max_steps=4), stage)(foreign(), datamodule=data, ckpt_path=checkpoint)
        assert data.vocab_size == 280


def test_the_tokenizer_comes_back_out_of_a_checkpoint(text, checkpoint):
    data = text("ship.json")
    data.setup()
    found = tokenizer_from_checkpoint(torch.load(checkpoint, weights_only=True))
    assert found.tokenizer.to_str() == data.tokenizer.to_str()
    assert found.name.endswith("ship.json")
    assert found.eot_id == data.eot_id == 0
    line = "the ship <|endoftext|> and ümlauts"
    assert 0 not in found.encode(line)
    assert found.decode([*found.encode(line), found.eot_id]) == line


def test_a_learned_tokenizer_is_named_by_its_text(text, folder):
    path = train(language_model(), text(), str(folder / "learned.ckpt"))
    found = tokenizer_from_checkpoint(torch.load(path, weights_only=True))
    assert found.name == f"BPE of 300 tokens learned from 1 file(s): {folder / 'story.txt'}"
    with pytest.raises(UsageError, match=r"trained with 'BPE of 300 tokens .* the data has 'BPE of 290 tokens "):
        trainer().validate(language_model(), datamodule=text(vocab_size=290), ckpt_path=path)


def test_data_of_another_class_is_compared_as_well(text, folder):
    path = train(language_model(), text("ship.json"), str(folder / "model.ckpt"))
    data = text("moon.json")
    data.setup()
    shards = {"train": str(data.folder / "train_*.bin"), "val": str(data.folder / "val_*.bin"), "seq_len": 16}
    tokens = TokenData(**shards, tokenizer=str(data.folder / "tokenizer.json"))
    with pytest.raises(UsageError, match=r"ship\.json' .* the data has '.*/tokenizer\.json'"):
        trainer().validate(language_model(), datamodule=tokens, ckpt_path=path)
    trainer().validate(language_model(), datamodule=TokenData(**shards), ckpt_path=path, verbose=False)  # knows none


def test_a_checkpoint_without_a_tokenizer_opens_as_before(text, checkpoint, tmp_path):
    old = torch.load(checkpoint, weights_only=True)
    del old["TextData"]["tokenizer"]
    torch.save(old, tmp_path / "old.ckpt")
    trainer(max_steps=4).fit(foreign(), text("moon.json"), ckpt_path=tmp_path / "old.ckpt")
    with pytest.raises(UsageError, match="holds no tokenizer"):
        tokenizer_from_checkpoint(old)
    with pytest.raises(UsageError, match=r"^tokenizer='.*old\.ckpt': cannot be read from this checkpoint"):
        text(tokenizer=str(tmp_path / "old.ckpt"))
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(UsageError, match=r"^tokenizer='.*list\.pt': cannot be read .* \(the checkpoint holds no token"):
        text(tokenizer=str(tmp_path / "list.pt"))


def test_the_example_in_the_docstring_runs():
    assert doctest.testmod(module).failed == 0


def test_a_record_that_another_version_of_the_library_wrote_is_the_same_tokenizer():
    own = tokenizer_record(train_bpe(["a story"], 257), "a", 0)
    check_same({**own, "sha256": "of other words", "json": own["json"].replace("{", "{ ", 1)}, own)


def test_a_folder_of_shards_gives_its_tokenizer(text, checkpoint, tmp_path):
    rest = torch.load(checkpoint, weights_only=True)
    weights = {"state_dict": rest.pop("state_dict")}
    torch.distributed.checkpoint.save(weights, checkpoint_id=tmp_path / "at.ckpt", no_dist=True)
    torch.save(rest, tmp_path / "at.ckpt" / "meta.pt")
    data = text(tokenizer=str(tmp_path / "at.ckpt"))
    run = trainer(plugins=[AtomicCheckpointIO()])
    run.validate(foreign(), datamodule=data, ckpt_path=str(tmp_path / "at.ckpt"), verbose=False)
