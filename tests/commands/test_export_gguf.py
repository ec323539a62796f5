"""`export --format gguf`: transformers finds the decoder's logits and token ids in the file, or nothing is kept."""

import json
import re

import gguf
import pytest
from commands.exported import SIZES, TEXT, VOCABULARY, checkpoint, fresh_python, save, tokenizer
from tokenizers import pre_tokenizers

from lightning_tricks import __main__ as door
from lightning_tricks._core.errors import UsageError
from lightning_tricks.commands.export import gguf_file, verify_export
from lightning_tricks.data.tokenizer import tokenizer_record, train_bpe
from lightning_tricks.models import GPT2, Llama

pytestmark = pytest.mark.long


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr("sys.executable", fresh_python())


def export(path, output, *options):
    door.run(["export", "--format", "gguf", "--ckpt_path", str(path), "--output", str(output), *map(str, options)])
    return gguf.GGUFReader(output / "model.gguf")


def values(opened):
    return {key: field.contents() for key, field in opened.fields.items()}


CASES = {
    "llama": Llama(**SIZES, tie_embeddings=True, n_kv_heads=2),
    "qwen3": Llama(**SIZES, qk_norm=True, rope_theta=5000.0),
    "arcee": Llama(**SIZES, activation="relu2", n_kv_heads=2),
    "apertus": Llama(**SIZES, activation="relu2", qk_norm=True, tie_embeddings=True),
    "gpt2": GPT2(**SIZES, bias=False, tie_embeddings=False, d_ff=96),
}


@pytest.mark.parametrize("architecture", CASES)
def test_transformers_reader_finds_the_same_model_and_tokens(architecture, tmp_path, capsys):
    config = CASES[architecture]
    opened = export(save(checkpoint(config), tmp_path / "saved.ckpt"), tmp_path / "out")
    printed = capsys.readouterr().out
    assert re.search(r"differ from the decoder's by at most \d\.\de-0[6-9]|by at most 0\.0e\+00", printed), printed
    assert "138 token ids of a sample are the same" in printed
    assert f"as llama.cpp's {architecture} in float32" in printed
    found = values(opened)
    own = {key.removeprefix(f"{architecture}."): value for key, value in found.items()}
    eps = "attention.layer_norm_epsilon" if architecture == "gpt2" else "attention.layer_norm_rms_epsilon"
    wanted = {
        "general.architecture": architecture,
        "general.file_type": gguf.LlamaFileType.ALL_F32,
        "context_length": 32,
        "embedding_length": 32,
        "block_count": 2,
        "feed_forward_length": config.ffn_width,
        "attention.head_count": 4,
        eps: pytest.approx(1e-5),
        "vocab_size": VOCABULARY,
    }
    if architecture != "gpt2":
        wanted |= {
            "attention.head_count_kv": config.kv_heads,
            "attention.key_length": 8,
            "rope.dimension_count": 8,
            "rope.freq_base": 5000.0 if architecture == "qwen3" else 10000.0,
        }
    assert {key: own.get(key) for key in wanted} == wanted
    stored = {tensor.name for tensor in opened.tensors}
    # llama.cpp's Apertus has a head of its own, tied or not
    assert ("output.weight" in stored) == (not config.tie_embeddings or architecture == "apertus")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["README.md", "model.gguf"]
    card = (tmp_path / "out/README.md").read_text()
    assert f"| architecture | `{architecture}` |" in card
    assert "llama-completion -m model.gguf" in card
    assert "library_name: gguf" in card


def test_the_file_has_the_tokenizer_of_the_checkpoint(tmp_path):
    config = Llama(**(SIZES | {"vocab_size": VOCABULARY + 2}))
    found = values(export(save(checkpoint(config), tmp_path / "saved.ckpt"), tmp_path / "out"))
    spec = json.loads(tokenizer()["json"])
    of_tokenizer = {key.removeprefix("tokenizer.ggml."): value for key, value in found.items() if "tokenizer." in key}
    by_id = sorted(spec["model"]["vocab"], key=spec["model"]["vocab"].get)
    assert of_tokenizer == {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": [*by_id, "[PAD280]", "[PAD281]"],
        "token_type": [3] + [1] * 279 + [5, 5],
        "merges": [" ".join(pair) for pair in spec["model"]["merges"]],
        "bos_token_id": 0,
        "eos_token_id": 0,
        "padding_token_id": 0,
        "add_bos_token": False,
        "add_eos_token": False,
    }


def test_bf16_keeps_vectors_and_positions_and_is_compared_with_the_rounded_weights(tmp_path, capsys):
    path = save(checkpoint(GPT2(**SIZES)), tmp_path / "saved.ckpt")
    opened = export(path, tmp_path / "out", "--dtype", "bf16")
    assert re.search(r"rounding to bfloat16 and float32 changed them by up to \d", capsys.readouterr().out)
    for tensor in opened.tensors:
        whole = len(tensor.shape) == 1 or tensor.name == "position_embd.weight"
        assert tensor.tensor_type == gguf.GGMLQuantizationType["F32" if whole else "BF16"], tensor.name
    assert values(opened)["general.file_type"] == gguf.LlamaFileType.MOSTLY_BF16


# ---- refused


def test_what_llama_cpp_cannot_express_is_one_line_and_leaves_nothing(tmp_path, monkeypatch):
    def saved(name, config, **changed):
        return save(checkpoint(config, **changed), tmp_path / f"{name}.ckpt")

    spaces = train_bpe([TEXT], VOCABULARY)
    spaces.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    of_spaces = {"tokenizer": tokenizer_record(spaces, "with spaces", 0)}
    good = saved("good", CASES["llama"])
    double = checkpoint(CASES["llama"])
    double["state_dict"] = {name: value.double() for name, value in double["state_dict"].items()}
    cases = [
        (saved("gelu", Llama(**SIZES, activation="gelu")), [], "activation=gelu: llama.cpp's arcee has relu2 alone"),
        (
            saved("capped", Llama(**SIZES, logit_softcap=15.0)),
            [],
            "decoder.logit_softcap=15.0: no model of ",
        ),
        (saved("relu2", GPT2(**SIZES, activation="relu2")), [], "activation=relu2: llama.cpp's gpt2 has gelu alone"),
        (
            saved("experts", Llama(**SIZES, n_experts=4, balance="none")),
            [],
            "n_experts=4: experts are not written: give",
        ),
        (saved("none", CASES["llama"], TextData=None), [], "holds no tokenizer, which a GGUF file needs: give hf"),
        (saved("spaces", CASES["llama"], TextData=of_spaces), [], "tokenizer 'with spaces' cannot be one of llama.cpp"),
        (save(double, tmp_path / "double.ckpt"), [], "weights in float64: give dtype fp32, bf16 or fp16"),
    ]
    before = sorted(tmp_path.iterdir())
    for path, options, says in cases:
        with pytest.raises(UsageError, match=says) as refused:
            export(path, tmp_path / "out", *options)
        assert "\n" not in str(refused.value)
    monkeypatch.setattr("lightning_tricks.commands.export.gguf_file.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"format=gguf: pip install -e '.\[gguf\]' in the clone"):
        export(good, tmp_path / "out")
    assert sorted(tmp_path.iterdir()) == before


def test_a_file_of_another_model_is_found_by_the_fresh_process(tmp_path, monkeypatch):
    path = save(checkpoint(CASES["llama"]), tmp_path / "saved.ckpt")
    monkeypatch.setattr(gguf_file, "_ROTATES_NEIGHBOURS", ())
    with pytest.raises(UsageError, match=r"logits of transformers differ from the decoder's by \d\.\d+e"):
        export(path, tmp_path / "out")
    assert [file.name for file in tmp_path.iterdir()] == ["saved.ckpt"]


def test_a_wrong_pre_tokenizer_is_found_by_the_fresh_process(tmp_path, monkeypatch):
    of_numbers = tokenizer_record(train_bpe([verify_export.TEXT] * 20, VOCABULARY + 40), "a text with numbers", 0)
    config = Llama(**(SIZES | {"vocab_size": VOCABULARY + 40}))
    path = save(checkpoint(config, TextData={"tokenizer": of_numbers}), tmp_path / "saved.ckpt")
    monkeypatch.setattr(gguf_file, "pre_tokenizer_name", lambda spec, name: "qwen2")
    with pytest.raises(UsageError, match="transformers' tokenizer gives other ids than 'a text with numbers'"):
        export(path, tmp_path / "out")
