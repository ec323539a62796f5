"""The configs: what they refuse, what their defaults are, and how a recipe writes them."""

import jsonargparse
import pytest
import torch
from torch import nn

from lightning_tricks._core.errors import UsageError
from lightning_tricks.models import GPT2, Decoder, DecoderConfig, Llama


class Model(nn.Module):
    """A LightningModule's constructor, as far as the parser sees it."""

    def __init__(self, decoder: DecoderConfig):
        super().__init__()
        self.config = decoder


@pytest.fixture
def parse(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("decoder: {class_path: Llama, init_args: {d_model: 256, n_layers: 4, n_heads: 4}}\n")
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--config", action="config")
    parser.add_class_arguments(Model, as_group=False)

    def parse(*arguments):
        parsed = parser.parse_args([f"--config={recipe}", *arguments])
        return parser.instantiate(parsed).decoder

    return parse


@pytest.mark.parametrize(("config", "parameters"), [(Llama(), 6_738_415_616), (GPT2(), 124_439_808)])
def test_defaults_are_the_published_models(config, parameters):
    with torch.device("meta"):
        decoder = Decoder(config)
    assert sum(p.numel() for p in decoder.parameters()) == parameters
    assert all(p.is_meta for p in decoder.parameters())


@pytest.mark.parametrize(
    ("config", "width"),
    [
        (Llama(), 11008),
        (Llama(d_model=256, n_heads=4), 768),  # 682 rounded up to 3 * 256
        (Llama(d_model=256, n_heads=4, activation="relu2"), 1024),
        (GPT2(), 3072),
        (GPT2(d_ff=100), 100),
    ],
)
def test_ffn_width_follows_the_familys_rule_unless_given(config, width):
    assert config.ffn_width == width


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocab_size": 0}, "vocab_size=0: give a whole number of at least 1"),
        ({"d_model": -1}, "d_model=-1: give a whole number of at least 1"),
        ({"n_layers": 1.5}, "n_layers=1.5: give a whole number of at least 1"),
        ({"n_heads": 0}, "n_heads=0: give a whole number of at least 1"),
        ({"n_kv_heads": 0}, "n_kv_heads=0: give a whole number of at least 1"),
        ({"d_ff": 0}, "d_ff=0: give a whole number of at least 1"),
        ({"n_experts": "8"}, "n_experts=8: give a whole number from 2 to 65536"),
        ({"n_experts": 8, "router_groups": None}, "router_groups=None: give a whole number from 1 to 8"),
        ({"n_experts": 8, "d_expert": 8.0}, "d_expert=8.0: products of experts need a multiple of 8, 16 bytes in bf16"),
        ({"n_experts": 8, "balance_rate": None}, "balance_rate=None: give a number from 0 on"),
        ({"n_experts": 8, "router_scale": "1"}, "router_scale=1: give a number from 0 on"),
        ({"max_seq_len": 0}, "max_seq_len=0: give a whole number of at least 1"),
        ({"norm_eps": 0.0}, "norm_eps=0.0: give a positive number"),
        ({"rope_theta": float("inf")}, "rope_theta=inf: give a positive number"),
        ({"init_std": float("nan")}, "init_std=nan: give a positive number"),
        ({"logit_softcap": 0.0}, "logit_softcap=0.0: give a positive number"),
        ({"activation": "silu"}, "activation='silu': give one of swiglu, gelu, relu2"),
        ({"n_heads": 3}, "d_model=4096 is no multiple of n_heads=3: change one of them"),
        ({"n_kv_heads": 5}, "n_kv_heads=5 does not divide n_heads=32: give a divisor"),
        (
            {"d_model": 12, "n_heads": 4},
            "d_model=12 over n_heads=4 makes heads 3 wide: rotary positions need an even width, change one of them",
        ),
    ],
)
def test_a_shape_that_cannot_be_built_is_refused_in_one_line(options, message):
    with pytest.raises(UsageError) as error:
        Llama(**options)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("arguments", "config"),
    [
        ((), Llama(d_model=256, n_layers=4, n_heads=4)),  # a family by its short name
        (("--decoder.init_args.n_layers=2",), Llama(d_model=256, n_layers=2, n_heads=4)),
        (
            ("--decoder=GPT2",),
            GPT2(d_model=256, n_layers=4, n_heads=4),
        ),  # keeps what was written, with its own defaults
    ],
)
def test_a_recipe_and_the_command_line_make_the_config(parse, arguments, config):
    assert parse(*arguments) == config
