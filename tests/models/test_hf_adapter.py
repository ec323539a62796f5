"""The adapter: every family both ways, weights and settings, equal to transformers; what none has is one line."""

import dataclasses
import re

import pytest
import torch
import transformers
from models.decoders import TINY, build, tokens

from lightning_tricks._core.errors import UsageError
from lightning_tricks.models import (
    GPT2,
    Decoder,
    Llama,
    decoder_config,
    from_hf,
    hf_config,
    hf_family,
    hf_weights,
    to_hf,
)

CONFIGS = {
    "llama": Llama(**TINY, n_kv_heads=2, rope_theta=5000.0, norm_eps=1e-4, d_ff=48),
    "llama tied": Llama(**TINY, tie_embeddings=True),
    "qwen3": Llama(**TINY, qk_norm=True, n_kv_heads=1),
    "arcee": Llama(**TINY, activation="relu2"),
    "arcee gelu": Llama(**TINY, activation="gelu", tie_embeddings=True),
    "apertus": Llama(**TINY, activation="relu2", qk_norm=True),
    "gpt2": GPT2(**TINY, norm_eps=1e-4, d_ff=48),
    "gpt2 untied": GPT2(**TINY, tie_embeddings=False, activation="relu2"),
    "gpt2 without biases": GPT2(**TINY, bias=False),
}


def of_transformers(config):
    """The model that transformers' own classes make of the adapter's settings."""
    theirs = transformers.AutoConfig.for_model(hf_family(config).model_type, **hf_config(config))
    return transformers.AutoModelForCausalLM.from_config(theirs).eval()


@pytest.mark.parametrize("name", CONFIGS)
def test_weights_go_there_and_back_and_give_the_same_logits_and_gradients(name):
    config = CONFIGS[name]
    ours, theirs = build(config).eval(), of_transformers(config)
    assert type(theirs).__name__ == hf_family(config).class_name
    state = to_hf(ours.state_dict(), config)
    assert {key: tuple(tensor.shape) for key, tensor in state.items()} == {w.name: w.shape for w in hf_weights(config)}
    missing, unexpected = theirs.load_state_dict(state, strict=False)
    assert unexpected == []
    assert set(missing) <= ({"lm_head.weight"} if config.tie_embeddings else set())
    input_ids = tokens(2, 24)
    logits, found = theirs(input_ids).logits, ours(input_ids)
    torch.testing.assert_close(found, logits, rtol=1e-5, atol=1e-5)
    weights = torch.randn(logits.shape)
    for each in (logits, found):
        (each * weights).mean().backward()
    trained = dict(theirs.named_parameters())
    if name != "gpt2 without biases":  # theirs has them
        gradients = from_hf({key: param.grad for key, param in trained.items()}, config)
        for key, param in ours.named_parameters():
            torch.testing.assert_close(param.grad, gradients[key], rtol=1e-4, atol=1e-7, msg=lambda m, k=key: k + m)
    back = from_hf(state, config)
    assert back.keys() == ours.state_dict().keys()
    assert all(torch.equal(tensor, back[key]) for key, tensor in ours.state_dict().items())


@pytest.mark.parametrize("name", CONFIGS)
def test_settings_go_through_transformers_own_file_and_back(name, tmp_path):
    config = CONFIGS[name]
    transformers.AutoConfig.for_model(hf_family(config).model_type, **hf_config(config)).save_pretrained(tmp_path)
    given = transformers.PretrainedConfig.get_config_dict(tmp_path)[0]
    kept = {"d_ff": config.ffn_width}
    kept |= {"bias": True} if isinstance(config, GPT2) else {"n_kv_heads": config.kv_heads}  # as they are written
    assert decoder_config(given) == dataclasses.replace(config, **kept)


def test_the_words_of_transformers_4_are_read_too():
    of_4 = {**of_llama(), "rope_theta": 5000.0, "torch_dtype": "float32", "rope_scaling": None}
    assert decoder_config(of_4).rope_theta == 5000.0
    assert decoder_config(of_llama()).rope_theta == 10000.0


def of_llama(**changed):
    given = {
        "model_type": "llama", "vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 48, "max_position_embeddings": 24,
    }  # fmt: skip
    return given | changed


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"model_type": "mamba"}, "model_type=mamba: the decoder is one of llama, qwen3, arcee, apertus, gpt2"),
        ({"attention_bias": True}, "attention_bias=True: the decoder has False alone"),
        ({"head_dim": 16}, "head_dim=16: the decoder's is hidden_size / num_attention_heads = 8"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu': the decoder has, of a llama, silu"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            "rope_type=linear: the decoder's rotary positions are not",
        ),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type=yarn"),
        ({"quantization_config": {"bits": 4}}, "quantization_config={'bits': 4}"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types="),
        ({"model_type": "apertus"}, "rope_type=llama3"),
        ({"hidden_size": None}, "config.json says no hidden_size"),
        (
            {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "scale_attn_weights": False},
            "scale_attn_weights",
        ),
    ],
)
def test_a_model_that_the_decoder_cannot_be_is_one_line(changed, says):
    with pytest.raises(UsageError, match=re.escape(says)) as refused:
        decoder_config(of_llama(hidden_act="relu2") | changed if "apertus" in str(changed) else of_llama() | changed)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        (
            {"activation": "swiglu"},
            "decoder.activation=swiglu: no GPT-2 of transformers has it, it would need gelu or relu2",
        ),
        ({"n_kv_heads": 2}, "decoder.n_kv_heads=2"),
        ({"qk_norm": True}, "decoder.qk_norm=True"),
    ],
)
def test_a_decoder_that_no_family_has_is_one_line(changed, says):
    with pytest.raises(UsageError, match=re.escape(says)):
        hf_family(GPT2(**TINY, **changed))


def test_a_tied_checkpoint_may_lack_the_head_and_old_ones_hold_masks():
    config = CONFIGS["gpt2"]
    state = to_hf(build(config).state_dict(), config)
    assert "lm_head.weight" not in state
    masks = {"transformer.h.0.attn.bias": torch.ones(1), "transformer.h.0.attn.masked_bias": torch.ones(1)}
    assert from_hf(state | masks, config).keys() == Decoder(config).state_dict().keys()
    with pytest.raises(UsageError, match=r"'model\.layers\.0\.rotary' has no place in the decoder"):
        from_hf({"model.layers.0.rotary": torch.ones(1)}, Llama())


def test_a_bias_that_the_decoder_lacks_must_be_zero():
    config = CONFIGS["gpt2 without biases"]
    state = to_hf(build(config).state_dict(), config)
    state["transformer.h.1.mlp.c_fc.bias"][3] = 0.5
    with pytest.raises(UsageError, match=r"'transformer\.h\.1\.mlp\.c_fc\.bias' is not zero, .*bias: true"):
        from_hf(state, config)
