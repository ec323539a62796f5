"""Same weights, same logits, same gradients as Hugging Face's models."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from lightning_tricks._core.errors import UsageError
from lightning_tricks.models import GPT2, Decoder, Llama, from_hf

SHAPE = {"vocab_size": 97, "d_model": 64, "n_layers": 3, "n_heads": 4, "d_ff": 112, "max_seq_len": 48}


def theirs_and_ours(family, **options):
    torch.manual_seed(0)
    if family == "gpt2":
        config = GPT2(**SHAPE, **options)
        theirs = GPT2LMHeadModel(
            GPT2Config(vocab_size=97, n_embd=64, n_layer=3, n_head=4, n_inner=112, n_positions=48, **NO_DROPOUT)
        )
        return theirs, config, from_hf(theirs.state_dict(), config)
    config = Llama(**SHAPE, rope_theta=5000.0, qk_norm=family == "qwen3", **options)
    config_class, model_class = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    }[family]
    theirs = model_class(
        config_class(
            vocab_size=97,
            hidden_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=config.kv_heads,
            head_dim=16,
            intermediate_size=112,
            max_position_embeddings=48,
            rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
            tie_word_embeddings=config.tie_embeddings,
        )
    )
    return theirs, config, from_hf(theirs.state_dict(), config)


NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
FAMILIES = [
    ("llama", {}),
    ("llama", {"n_kv_heads": 2}),
    ("llama", {"n_kv_heads": 1, "tie_embeddings": True}),
    ("qwen3", {"n_kv_heads": 2}),
    ("gpt2", {}),
]


def shake(model):
    """Move every parameter off its initial value, norms and biases too, or a wrong one could hide."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)


@pytest.mark.parametrize(("family", "options"), FAMILIES)
def test_logits_and_every_gradient_equal_hugging_faces(family, options):
    theirs, config, _ = theirs_and_ours(family, **options)
    shake(theirs)
    ours = Decoder(config)
    ours.load_state_dict(from_hf(theirs.state_dict(), config))
    input_ids = torch.randint(97, (2, 48))
    weights = torch.randn(2, 48, 97)

    their_logits, our_logits = theirs(input_ids).logits, ours(input_ids)
    torch.testing.assert_close(our_logits, their_logits, rtol=1e-5, atol=1e-5)

    (their_logits * weights).mean().backward()
    (our_logits * weights).mean().backward()
    gradients = from_hf({name: p.grad for name, p in theirs.named_parameters()}, config)
    parameters = dict(ours.named_parameters())
    assert parameters.keys() == gradients.keys() - ({"head.weight"} if config.tie_embeddings else set())
    for name, parameter in parameters.items():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-4, atol=1e-7, msg=lambda m, n=name: n + m)


def test_a_tied_checkpoint_may_lack_the_head():
    theirs, config, state = theirs_and_ours("gpt2")
    lean = {name: tensor for name, tensor in theirs.state_dict().items() if name != "lm_head.weight"}
    assert from_hf(lean, config).keys() == state.keys()


def test_the_causal_masks_of_old_checkpoints_are_left_out():
    theirs, config, state = theirs_and_ours("gpt2")
    old = theirs.state_dict() | {
        "transformer.h.0.attn.bias": torch.ones(1),
        "transformer.h.0.attn.masked_bias": torch.ones(1),
    }
    assert from_hf(old, config).keys() == state.keys()


def test_a_weight_without_a_place_is_named():
    with pytest.raises(UsageError) as error:
        from_hf({"model.layers.0.self_attn.rotary": torch.ones(1)}, Llama())
    assert "'model.layers.0.self_attn.rotary' has no place in the decoder" in str(error.value)
