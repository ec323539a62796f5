import pytest
from torch import nn

from lightning_tricks import GPT2, Llama
from lightning_tricks._core.errors import UsageError
from lightning_tricks.models import Decoder
from lightning_tricks.optim import ParamRule, decay_groups
from lightning_tricks.optim.freezing import freeze

SIZES = {"vocab_size": 8, "d_model": 8, "n_layers": 2, "n_heads": 2, "max_seq_len": 8}


def frozen(module: nn.Module) -> set[str]:
    return {name for name, parameter in module.named_parameters() if not parameter.requires_grad}


@pytest.mark.parametrize(
    ("patterns", "names"),
    [
        (["embed"], {"embed.weight"}),
        (["role=embedding"], {"embed.weight"}),
        (["role=matrix:0.*mlp.up", "^norm"], {"blocks.0.mlp.up.weight", "norm.weight"}),
        (
            ["role=norm"],
            {"norm.weight", *(f"blocks.{n}.{part}_norm.weight" for n in (0, 1) for part in ("attn", "mlp"))},
        ),
    ],
)
def test_a_pattern_fits_names_roles_or_both(patterns, names):
    model = Decoder(Llama(**SIZES))
    assert set(freeze(model, patterns)) == names == frozen(model)
    assert set(freeze(model, patterns)) == names  # again: it still sees the frozen
    grouped = {name for group in decay_groups(model) for name in group["param_names"]}
    assert grouped == dict(model.named_parameters()).keys() - names


def test_a_tied_weight_is_frozen_by_either_of_its_names():
    for pattern in ("embed.weight", "head"):
        model = Decoder(GPT2(**SIZES))
        freeze(model, [pattern])
        assert not model.head.weight.requires_grad
        assert "embed.weight" in frozen(model)


@pytest.mark.parametrize(
    ("patterns", "line"),
    [
        (["embd"], "freeze: pattern 'embd' matches no parameter: near names are "),
        (["role=router"], "freeze: role 'router' matches no parameter: roles there are "),
        (["role=embed"], "freeze: role"),
        (["(", "embed"], "freeze: pattern '\\(' is no regular expression"),
        ([""], "freeze: '' is no pattern"),
        (["."], r"freeze=\['.'\]: all 21 parameters are frozen"),
    ],
)
def test_a_wrong_pattern_is_refused_in_one_line(patterns, line):
    model = Decoder(Llama(**SIZES))
    with pytest.raises(UsageError, match=line) as error:
        freeze(model, patterns)
    assert "\n" not in str(error.value)
    assert not frozen(model)


def test_a_rule_for_frozen_parameters_alone_stays_without_effect():
    model, rule = Decoder(Llama(**SIZES)), ParamRule("embed", lr_scale=4.0)
    assert "decay:embed" in {group["name"] for group in decay_groups(model, rules=[rule])}
    freeze(model, ["embed"])
    assert {group["name"] for group in decay_groups(model, rules=[rule])} == {"decay", "no_decay"}
