"""The adapter: every family both ways, weights and settings, equal to transformers; what none has is one line."""

import dataclasses
import re

import pytest
import torch
import transformers
from models.decoders import TINY, build, tokens
from safetensors.torch import load_file, save_file

from lightning_tricks._core.errors import UsageError
from lightning_tricks.checkpoints.load_weights import architecture, check_architecture
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
        (
            {"model_type": "mamba"},
            "model_type=mamba: the decoder is one of llama, qwen3, arcee, apertus, mixtral, qwen3_moe, olmoe, dots1,",
        ),
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
        ({"logit_softcap": 15.0}, "decoder.logit_softcap=15.0: no model of transformers has it and is a decoder like"),
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


EXPERTS = {"n_experts": 4, "experts_per_token": 2, "d_expert": 16}
MIXTURES = {
    "mixtral": Llama(**TINY, **EXPERTS, balance="none", n_kv_heads=2),
    "qwen3_moe": Llama(
        **TINY, **EXPERTS, balance="none", qk_norm=True, dense_layers=1, d_ff=48, normalize_router=False
    ),
    "olmoe": Llama(**TINY, **EXPERTS, balance="none", qk_norm="whole", n_kv_heads=2, normalize_router=False),
    "dots1": Llama(
        **TINY, **EXPERTS, qk_norm=True, router="sigmoid", router_scale=2.5, n_shared_experts=2, dense_layers=1,
        d_ff=48, router_groups=2, groups_per_token=1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MIXTURES)
def test_a_folder_of_a_mixture_goes_there_and_back_and_gives_the_same_logits(name, tmp_path):
    config = MIXTURES[name]
    ours = build(config).eval()
    if config.balance == "bias":
        ours.blocks[1].mlp.router.bias.copy_(torch.tensor([0.3, -0.2, 0.1, 0.0]))
    family, state = hf_family(config), to_hf(ours.state_dict(), config)
    assert family.model_type == name
    assert {key: tuple(tensor.shape) for key, tensor in state.items()} == {w.name: w.shape for w in hf_weights(config)}
    stored = {key: tensor.contiguous() for key, tensor in state.items()}
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    settings = transformers.AutoConfig.for_model(name, **hf_config(config), architectures=[family.class_name])
    settings.save_pretrained(tmp_path)
    theirs, loading = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(loading.values())
    assert type(theirs).__name__ == family.class_name
    input_ids = tokens(2, 24)
    torch.testing.assert_close(ours(input_ids), theirs(input_ids).logits, rtol=1e-5, atol=1e-5)
    theirs.save_pretrained(tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert again.keys() == state.keys()  # the names of its folders
    back = from_hf(again, config)
    assert back.keys() == ours.state_dict().keys()
    assert all(torch.equal(tensor, back[key]) for key, tensor in ours.state_dict().items())
    read = decoder_config(transformers.PretrainedConfig.get_config_dict(tmp_path)[0])
    check_architecture(config, {"decoder_config": architecture(read)}, {"init_std"})
    del again[next(key for key in again if ".experts.2." in key)]
    with pytest.raises(UsageError, match="has 3 of 4 experts: take another copy"):
        from_hf(again, config)


SIGMOID = {"router": "sigmoid", "balance": "bias"}


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"balance": "bias"}, "decoder.balance=bias: no MixtralForCausalLM has it, it would need none"),
        ({"qk_norm": True, "n_shared_experts": 1}, "decoder.n_shared_experts=1: no Qwen3MoeForCausalLM has it"),
        (SIGMOID, "decoder.qk_norm=False: no Dots1ForCausalLM has it"),
        ({**SIGMOID, "qk_norm": True}, "decoder.n_shared_experts=0: no Dots1ForCausalLM has it, it would need at"),
        ({"n_experts": None, "d_expert": None, "qk_norm": "whole"}, "decoder.qk_norm=whole: transformers has it with"),
        ({"model_type": "deepseek_v3"}, "model_type=deepseek_v3: the decoder has its router and experts, and not its"),
        ({"model_type": "mixtral", "sliding_window": 4096}, "sliding_window=4096: the decoder has None alone"),
        ({"model_type": "olmoe", "clip_qkv": 8.0}, "clip_qkv=8.0: the decoder has None alone"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [1]}, "mlp_only_layers=[1], decoder_sparse_step=1: the"),
        ({"model_type": "olmoe"}, "config.json says no num_experts"),
    ],
)
def test_a_mixture_that_the_other_side_does_not_have_is_one_line(changed, says):
    experts = {} if changed.get("model_type") == "olmoe" else {"num_experts": 4}
    given = of_llama(**experts, num_experts_per_tok=2, moe_intermediate_size=16)
    of_theirs, of_ours = (
        lambda: decoder_config(given | changed),
        lambda: hf_family(dataclasses.replace(ours, **changed)),
    )
    ours = MIXTURES["mixtral"]
    with pytest.raises(UsageError, match=re.escape(says)):
        (of_theirs if "model_type" in changed else of_ours)()
