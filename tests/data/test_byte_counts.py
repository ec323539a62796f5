"""Bits per byte count the bytes of the text itself, whatever the tokenizer makes of it, or are left out with a line."""

import json

import numpy as np
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from lightning_tricks._core.errors import UsageError
from lightning_tricks.data import TextData, TokenData
from lightning_tricks.data.tokenizer import END_OF_TEXT, as_text_only, changes_text, token_texts, train_bpe

LEARNED = train_bpe(["this is in Ünderstanding: hi  in the <x> of 12 it's in"] * 9, 300).to_str()
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)
NORMALIZERS = [
    *[None] * 4,
    normalizers.NFC(),
    normalizers.NFKD(),
    normalizers.Lowercase(),
    normalizers.Strip(),
    normalizers.Prepend("▁"),
    normalizers.Replace("i", "long"),
    normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()]),
]
PRE_TOKENIZERS = [
    BYTES,
    pre_tokenizers.ByteLevel(add_prefix_space=True),
    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), BYTES]),
    pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "merged_with_next"), BYTES]),
    pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.Punctuation(), BYTES]),
    pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), BYTES]),
    pre_tokenizers.Sequence([pre_tokenizers.Metaspace(), BYTES]),
    pre_tokenizers.Sequence([BYTES, BYTES]),
]
added_tokens = st.builds(
    AddedToken,
    st.sampled_from(["hi", "é", "  ", "<x>", "Ġin", "in", "Ã", " a", "i", "E\u0301"]),
    single_word=st.booleans(),
    lstrip=st.booleans(),
    rstrip=st.booleans(),
    normalized=st.booleans(),
    special=st.booleans(),
)
PARTS = [*"hi n<x>aéÉİÃĠ1'\n\t.🦎", "E\u0301", "\u00a0", " hi ", " in", END_OF_TEXT]
texts = st.lists(st.sampled_from(PARTS), max_size=20).map("".join)


@st.composite
def tokenizers(draw) -> Tokenizer:
    """Byte-level tokenizers, of which most change a text."""
    spec = json.loads(LEARNED)
    spec["model"]["ignore_merges"] = draw(st.booleans())
    tokenizer = Tokenizer.from_str(json.dumps(spec))
    if (normalizer := draw(st.sampled_from(NORMALIZERS))) is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = draw(st.sampled_from(PRE_TOKENIZERS))
    tokenizer.add_tokens(draw(st.lists(added_tokens, max_size=2)))
    return as_text_only(tokenizer)


def counted(data) -> int:
    return sum(int(batch["n_bytes"].sum()) for batch in data.val_dataloader())


def left_out(data) -> bool:
    """Whether no batch has bytes, as where bytes of text may become a special token, whose labels do not count."""
    special = [token.content for token in data.tokenizer.get_added_tokens_decoder().values() if token.special]
    taken_whole = data.tokenizer.model.ignore_merges  # a piece of that name is then the special token
    vocabulary = data.tokenizer.get_vocab(False)
    may_be_text = any(name in vocabulary for name in special if taken_whole or name != END_OF_TEXT)
    return may_be_text and all("n_bytes" not in batch for batch in data.val_dataloader())


def rows_in(path, documents):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return str(path)


@settings(max_examples=30)  # each writes files
@given(tokenizers(), st.lists(texts.filter(str.strip), min_size=1, max_size=4), st.integers(1, 9))
def test_a_whole_text_counts_each_of_its_bytes_once_under_any_tokenizer(
    tmp_path_factory, tokenizer, documents, seq_len
):
    folder = tmp_path_factory.mktemp("whole")
    tokenizer.save(str(folder / "tokenizer.json"))
    files = rows_in(folder / "a.jsonl", documents)
    options = {"seq_len": seq_len, "cache_dir": str(folder / "cache")}
    data = TextData.held_out(files, str(folder / "tokenizer.json"), **options)
    set_up(data)
    assert left_out(data) or counted(data) == len("".join(documents).encode())


def set_up(data):
    """Encode its text; where the library itself panics, as for some added words in mid-character, it is no example."""
    try:
        data.setup()
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # of Rust, which Python cannot import
            raise
        reject()


@given(tokenizers(), st.lists(texts, min_size=1, max_size=20))
def test_a_tokenizer_that_is_said_to_change_no_text_gives_its_bytes_back(tokenizer, documents):
    if changes_text(tokenizer) is None:
        behind = token_texts(tokenizer)
        for text in documents:
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            assert b"".join(behind[i] for i in ids) == text.encode()


def written(folder, tokenizer) -> TextData:
    tokenizer.save(str(folder / "tokenizer.json"))
    files = rows_in(folder / "a.jsonl", [f"Document {number} hi in the" for number in range(40)])
    options = {"tokenizer": str(folder / "tokenizer.json"), "cache_dir": str(folder / "cache")}
    data = TextData(files, seq_len=8, val_fraction=0.2, **options)
    data.setup()
    return data


def as_shards(data: TextData, folder) -> TokenData:
    tokenizer = str(data.folder / "tokenizer.json")
    shards = TokenData(str(folder / "train_*.bin"), str(folder / "val_*.bin"), tokenizer=tokenizer, seq_len=8)
    shards.setup()
    return shards


def test_shards_of_text_data_keep_its_count_of_bytes(tmp_path, caplog):
    tokenizer = Tokenizer.from_str(LEARNED)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    data = written(tmp_path, tokenizer)
    assert counted(as_shards(data, data.folder)) == counted(data)
    assert not caplog.records
    (data.folder / "val_byte_corrections.npy").write_bytes(b"")
    with pytest.raises(UsageError, match=r"^val: .*val_byte_corrections\.npy is damaged \(.+\); delete that file$"):
        as_shards(data, data.folder)


@pytest.mark.parametrize("changed", [False, True])
def test_shards_alone_have_bytes_only_where_the_tokenizer_changes_no_text_and_a_line_says_why(
    changed, tmp_path, caplog
):
    tokenizer = Tokenizer.from_str(LEARNED)
    if changed:
        tokenizer.normalizer = normalizers.Lowercase()
    data = written(tmp_path, tokenizer)
    assert not caplog.records
    (tmp_path / "moved").mkdir()
    for shard in data.folder.glob("*.bin"):
        (tmp_path / "moved" / shard.name).write_bytes(shard.read_bytes())
    shards = as_shards(data, tmp_path / "moved")
    said = [record.getMessage() for record in caplog.records]
    if changed:
        assert all("n_bytes" not in batch for batch in shards.val_dataloader())
        assert len(said) == 1
        assert said[0].startswith("No bits per byte: the bytes behind tokens of ")
        assert said[0].endswith("tokenizer.json are not known (it has the normalizer Lowercase)")
    else:
        assert counted(shards) == counted(data)
        assert not said


def test_text_in_tokens_without_bytes_has_none_counted_and_a_line_says_why(tmp_path, caplog):
    tokenizer = Tokenizer(models.WordLevel({"▁unknown": 0, "hi": 1, END_OF_TEXT: 2}, unk_token="▁unknown"))
    tokenizer.pre_tokenizer, tokenizer.decoder = BYTES, decoders.ByteLevel()
    data = written(tmp_path, tokenizer)
    batches = list(data.val_dataloader())
    assert all("n_bytes" not in batch for batch in batches)
    assert np.unique(np.concatenate([batch["labels"].numpy().ravel() for batch in batches])).tolist() == [-100, 0]
    (record,) = caplog.records
    assert record.getMessage().endswith("are not known (it is a WordLevel, no BPE)")
