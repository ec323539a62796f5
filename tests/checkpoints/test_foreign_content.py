"""Junk in Hugging Face folders and checkpoints of others is one line, before anything of its size is built."""

import json
import re

import pytest
from checkpoints.test_inside import hugging_face
from commands.exported import checkpoint, save
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_tricks import GPT2, LanguageModel, Llama
from lightning_tricks import __main__ as door
from lightning_tricks._core.errors import UsageError
from lightning_tricks.checkpoints.hf_folder import decoder_config_of, open_weights, read_hf_folder
from lightning_tricks.checkpoints.load_weights import stream_weights
from lightning_tricks.models import Decoder, DecoderConfig, hf_config

SIZES = {"vocab_size": 280, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64}
CONFIGS = {
    "llama": {"model_type": "llama", **hf_config(Llama(**SIZES)), "layer_types": None, "rope_scaling": None},
    "gpt2": {"model_type": "gpt2", **hf_config(GPT2(**SIZES))},
}
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=12), inner, max_size=2),
    max_leaves=4,
)  # fmt: skip


@given(st.sampled_from(list(CONFIGS)), st.data())
@settings(max_examples=300)
def test_any_value_of_a_setting_is_a_decoder_or_one_line(kind, data):
    config = dict(CONFIGS[kind])
    for key in data.draw(st.lists(st.sampled_from(list(config)), max_size=2)):
        config[key] = data.draw(values)
    if data.draw(st.booleans()) and isinstance(config.get("rope_parameters"), dict):
        config["rope_parameters"] = {**config["rope_parameters"], "rope_theta": data.draw(values)}
    try:
        found = decoder_config_of(config, "folder")
    except UsageError:
        return
    assert isinstance(found, DecoderConfig)
    assert type(found.n_layers) is int
    assert type(found.n_heads) is int
    assert type(found.tie_embeddings) is bool
    assert all(isinstance(value, float) for value in (found.norm_eps, found.rope_theta, found.init_std))


@pytest.fixture
def folder(tmp_path):
    return hugging_face(tmp_path / "hf")


def change(folder, **changed):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads=0"),
        ({"num_hidden_layers": 10**7}, "num_hidden_layers=10000000"),
        ({"num_hidden_layers": 10**18}, f"num_hidden_layers={10**18}"),
        ({"num_hidden_layers": True}, "config.json says no num_hidden_layers"),
        ({"vocab_size": 10**12}, "vocab_size=1000000000000"),
        ({"layer_types": 3}, "is none of transformers"),
        ({"model_type": ["llama"]}, "model_type=['llama']"),
    ],
)
def test_sizes_that_no_model_has_are_one_line_and_nothing_is_built(folder, tmp_path, changed, says):
    change(folder, **changed)
    with pytest.raises(UsageError, match=re.escape(says)):
        door.run(["import", str(folder), "--output", str(tmp_path / "mine.yaml")])
    with pytest.raises(UsageError, match=re.escape(says)):
        read_hf_folder(folder, Decoder(Llama(**SIZES)))


def test_a_rope_theta_of_null_is_its_default(folder):
    config = {**CONFIGS["llama"], "rope_parameters": {"rope_type": "default", "rope_theta": None}}
    assert decoder_config_of(config, folder).rope_theta == 10000.0


@pytest.mark.parametrize("names", [{"a": 1}, None, [], "x", {"a": None}, {"a": ["b"]}, {}])
def test_an_index_of_anything_but_names_is_one_line(folder, names):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    with pytest.raises(UsageError, match=r"weight_map|has no \.safetensors"):
        open_weights(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors.index.json", "model.safetensors"])
@given(
    content=st.binary(max_size=40) | st.just(b"[" * 100_000) | st.sampled_from([b"\xff\xfe{}", b"1", b"null", b"{}"])
)
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_any_bytes_of_a_file_are_one_line(folder, name, content):
    (folder / name).write_bytes(content)
    with pytest.raises(UsageError):
        door.run(["import", str(folder), "--output", str(folder / "mine.yaml")])


@pytest.mark.parametrize("kind", ["file", "folder"])
@pytest.mark.parametrize(
    "changed", [{"n_layers": 10**7}, {"n_heads": 0}, {"d_model": "x"}, {"norm_eps": None}, {"n_layers": [2]}]
)
def test_a_decoder_that_cannot_be_is_one_line_and_is_not_built(tmp_path, changed, kind):
    content = checkpoint(Llama(**SIZES))
    content["decoder_config"] |= changed
    path = save(content, tmp_path / "junk.ckpt", kind)
    with pytest.raises(UsageError, match=r"damaged: .*decoder_config"):
        stream_weights(path)
    with pytest.raises(UsageError, match=r"damaged: .*decoder_config"):
        LanguageModel.load_from_checkpoint(path)
