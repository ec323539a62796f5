"""Parameter groups: nanoGPT's rule on the two model families, each parameter once, rules by name."""

import math

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from lightning_tricks._core.errors import UsageError
from lightning_tricks.optim import LayerwiseLRDecay, ParamRule, build_optimizer, decay_groups, groups_table
from lightning_tricks.optim.decay_groups import check_each_parameter_once


def gpt2():
    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=11, n_positions=6))


def llama(tied=False):
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 8}
    return LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=12, vocab_size=11, tie_word_embeddings=tied))


def names(groups):
    return {group["name"]: group["param_names"] for group in groups}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
        self.norm = nn.LayerNorm(4)


@pytest.mark.parametrize("build", [gpt2, llama, lambda: llama(tied=True)], ids=["gpt2", "llama", "llama tied"])
def test_gpt2_and_llama_get_nanogpts_groups(build):
    model = build()
    trainable = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    decay, no_decay = decay_groups(model, weight_decay=0.1)
    assert decay["param_names"] == [name for name, param in trainable if param.dim() >= 2]
    assert no_decay["param_names"] == [name for name, param in trainable if param.dim() < 2]
    assert [id(p) for p in decay["params"]] == [id(param) for _, param in trainable if param.dim() >= 2]
    assert (decay["weight_decay"], no_decay["weight_decay"]) == (0.1, 0.0)


def test_groups_by_hand():
    groups = decay_groups(Model(), weight_decay=0.3)
    assert names(groups) == {
        "decay": ["embed.weight", "layers.0.weight", "layers.1.weight"],
        "no_decay": ["layers.0.bias", "layers.1.bias", "norm.weight", "norm.bias"],
    }
    assert [(group["weight_decay"], group["lr_scale"]) for group in groups] == [(0.3, 1.0), (0.0, 1.0)]


# ---- rules


def test_a_rule_scales_the_learning_rate_and_keeps_the_roles():
    groups = decay_groups(Model(), 0.1, rules=[ParamRule(r"layers\.1", lr_scale=0.5)])
    assert names(groups) == {
        "decay": ["embed.weight", "layers.0.weight"],
        "no_decay": ["layers.0.bias", "norm.weight", "norm.bias"],
        r"decay:layers\.1": ["layers.1.weight"],
        r"no_decay:layers\.1": ["layers.1.bias"],
    }
    assert [(group["weight_decay"], group["lr_scale"]) for group in groups] == [(0.1, 1), (0, 1), (0.1, 0.5), (0, 0.5)]


def test_a_rule_with_a_decay_beats_the_roles():
    decays = {
        name: group["weight_decay"]
        for group in decay_groups(Model(), 0.1, rules=[ParamRule("embed|norm", weight_decay=0.02)])
        for name in group["param_names"]
    }
    assert decays["embed.weight"] == decays["norm.weight"] == decays["norm.bias"] == 0.02
    assert decays["layers.0.weight"] == 0.1


def test_a_rule_for_a_role_and_one_for_a_pattern_of_the_same_word_have_groups_of_their_own():
    rules = [ParamRule(role="embedding", pattern="weight", lr_scale=2), ParamRule("layers", role="bias", lr_scale=3),
             ParamRule("bias", lr_scale=4)]  # fmt: skip
    scales = {
        group["name"]: group["lr_scale"] for group in decay_groups(Model(), rules=rules) if group["lr_scale"] != 1
    }
    assert scales == {"decay:role=embedding:weight": 2, "no_decay:role=bias:layers": 3, "no_decay:bias": 4}


def test_a_rule_that_matches_nothing_names_its_pattern_and_near_names():
    with pytest.raises(UsageError, match=r"pattern 'embd\.weight' matches no parameter: near names are embed\.weight"):
        decay_groups(Model(), rules=[ParamRule("norm"), ParamRule(r"embd\.weight".replace("\\", ""))])


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (ParamRule(role="router"), "role 'router' matches no parameter: roles there are bias, embedding, head, "),
        (
            ParamRule("layers", role="norm"),
            "role 'norm', pattern 'layers' matches no parameter: roles there are bias, ",
        ),
    ],
)
def test_a_rule_whose_role_matches_nothing_names_the_roles_that_are_there(rule, message):
    with pytest.raises(UsageError, match=f"^param_rules: {message}(head, )?matrix"):
        decay_groups(Model(), rules=[rule])


def test_a_rule_that_earlier_rules_leave_nothing_is_refused():
    with pytest.raises(UsageError, match=r"take all 1 parameters that rule 1 \(pattern 'embed'\)"):
        decay_groups(Model(), rules=[ParamRule("weight"), ParamRule("embed")])


@pytest.mark.parametrize(("build", "scale_of_head"), [(lambda: llama(tied=True), 4), (llama, 1.5)])
def test_rules_for_embedding_and_head_hold_for_a_model_that_ties_the_two(build, scale_of_head):
    model = build()
    rules = [ParamRule("embed", lr_scale=4), ParamRule("lm_head", lr_scale=1.5)]
    scales = {param: group["lr_scale"] for group in decay_groups(model, rules=rules) for param in group["params"]}
    assert (scales[model.get_input_embeddings().weight], scales[model.lm_head.weight]) == (4, scale_of_head)
    assert {scales[param] for param in model.model.layers.parameters()} == {1}


@pytest.mark.parametrize(
    ("call", "words"),
    [
        *((lambda bad=bad: decay_groups(Model(), bad), f"weight_decay={bad}") for bad in (-0.1, math.nan)),
        (lambda: LayerwiseLRDecay(1.5), r"LayerwiseLRDecay\.decay=1\.5"),
        (lambda: decay_groups(nn.Linear(4, 4), rules=[LayerwiseLRDecay()]), "Linear has no repeated blocks"),
    ],
)
def test_a_decay_that_cannot_be_is_refused(call, words):
    with pytest.raises(UsageError, match=words):
        call()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "^ParamRule: it has neither pattern nor role: say which parameters it is for$"),
        ({"role": "body"}, r"^ParamRule\.role='body': give one of state, norm, bias, "),
        ({"pattern": "("}, r"^ParamRule: pattern '\(' is no regular expression"),
        ({"pattern": "a", "lr_scale": -1.0}, r"lr_scale=-1\.0 \(pattern 'a'\)"),
        ({"pattern": "a", "lr_scale": math.nan}, "lr_scale=nan"),
        ({"pattern": "a", "weight_decay": -0.1}, r"weight_decay=-0\.1"),
        ({"pattern": "a", "weight_decay": math.inf}, "weight_decay=inf"),
        ({"pattern": "a", "eps": -1e-8}, "eps=-1e-08"),
        (
            {"pattern": "a", "betas": (0.9, 1.0)},
            r"^ParamRule\.betas=\(0\.9, 1\.0\) \(pattern 'a'\): give numbers",
        ),
    ],
)
def test_a_rule_refuses_a_bad_setting(settings, message):
    with pytest.raises(UsageError, match=message):
        ParamRule(**settings)


# ---- each once


def test_a_parameter_left_out_or_in_two_groups_is_named_unless_it_is_frozen():
    model = Model()
    model.norm.requires_grad_(False)
    first, second = decay_groups(model)
    check_each_parameter_once(model, [first, second])
    with pytest.raises(UsageError, match=r"'embed\.weight' is in no group"):
        check_each_parameter_once(model, [second])
    with pytest.raises(UsageError, match=r"'embed\.weight' is in 2 groups"):
        check_each_parameter_once(model, [first, first, second])


# ---- the table


def test_the_table_by_hand():
    groups = decay_groups(Model(), 0.1, rules=[ParamRule("embed", lr_scale=0.5)])
    assert groups_table(groups, lr=3e-4) == (
        "group        tensors  parameters       lr  decay\n"
        "decay              2          32   0.0003    0.1\n"
        "no_decay           4          16   0.0003      0\n"
        "decay:embed        1          20  0.00015    0.1\n"
        "total              7          68"
    )


def test_the_table_has_betas_and_eps_where_groups_have_different_ones():
    rules = [ParamRule("embed", betas=(0.9, 0.99)), ParamRule("norm", eps=1e-6)]
    lines = groups_table(build_optimizer(Model(), rules=rules).param_groups, lr=0.0).splitlines()
    assert [line.split()[5:] for line in lines] == [
        ["betas", "eps"], ["(0.9,", "0.95)", "1e-08"], ["(0.9,", "0.95)", "1e-08"],
        ["(0.9,", "0.99)", "1e-08"], ["(0.9,", "0.95)", "1e-06"], [],
    ]  # fmt: skip


def test_the_table_counts_a_parameter_that_deepspeed_has_partitioned_as_a_whole():
    partitioned = nn.Parameter(torch.empty(0))
    partitioned.ds_numel = 12
    assert groups_table([{"name": "decay", "params": [partitioned]}], lr=1.0).splitlines()[-1].split()[-1] == "12"


def test_the_state_of_a_recurrence_does_not_decay_and_a_class_token_does_unless_its_model_exempts_it():
    mixer = nn.Linear(2, 2)
    mixer.A_log = nn.Parameter(torch.zeros(2, 2))
    mixer.cls_token = nn.Parameter(torch.zeros(1, 1, 2))
    by_name = {group["name"]: group["param_names"] for group in decay_groups(mixer)}
    assert by_name == {"decay": ["weight", "cls_token"], "no_decay": ["bias", "A_log"]}
    mixer.no_weight_decay = lambda: {"cls_token", "pos_embed"}
    assert "cls_token" in decay_groups(mixer)[1]["param_names"]


# ---- LayerwiseLRDecay


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(3)])
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 8)


def scales(model, rules):
    optimizer = build_optimizer(model, rules=rules)
    return {name: round(group["lr"] / 3e-4, 6) for group in optimizer.param_groups for name in group["param_names"]}


def test_each_block_learns_by_its_depth():
    rules = [ParamRule(r"^blocks\.1\.0\.bias$", lr_scale=3.0), LayerwiseLRDecay(0.5)]
    assert scales(Blocks(), rules) == {
        "embed.weight": 0.5**4,
        **{f"blocks.0.{name}": 0.5**3 for name in ("0.weight", "0.bias", "1.weight", "1.bias")},
        **{f"blocks.1.{name}": 0.5**2 for name in ("0.weight", "1.weight", "1.bias")},
        "blocks.1.0.bias": 3.0,
        **{f"blocks.2.{name}": 0.5 for name in ("0.weight", "0.bias", "1.weight", "1.bias")},
        **dict.fromkeys(("norm.weight", "norm.bias", "head.weight", "head.bias"), 1.0),
    }


def test_a_frozen_block_and_one_that_an_earlier_rule_takes_change_nothing_for_the_others():
    model, rules = Blocks(), [ParamRule(r"^blocks\.1\.", lr_scale=3.0), LayerwiseLRDecay(0.5)]
    whole = scales(model, rules)
    assert {name[:8]: scale for name, scale in whole.items() if name.startswith("blocks")} == {
        "blocks.0": 0.5**3, "blocks.1": 3.0, "blocks.2": 0.5,
    }  # fmt: skip
    model.blocks[0].requires_grad_(False)
    left = scales(model, rules)
    assert left == {name: scale for name, scale in whole.items() if not name.startswith("blocks.0")}
    model.embed.requires_grad_(False)
    del left["embed.weight"]
    assert scales(model, rules) == left


def test_it_is_refused_where_nothing_is_left_for_it():
    with pytest.raises(
        UsageError, match="LayerwiseLRDecay: all parameters of the 3 blocks, and those before them, are"
    ):
        build_optimizer(Blocks(), rules=[ParamRule("embed|blocks", lr_scale=3.0), LayerwiseLRDecay(0.5)])
    model = Blocks()
    model.blocks.requires_grad_(False)
    assert scales(model, [LayerwiseLRDecay(0.5)])["embed.weight"] == 0.5**4
    model.embed.requires_grad_(False)
    with pytest.raises(UsageError, match="LayerwiseLRDecay: all parameters of the 3 blocks"):
        build_optimizer(model, rules=[LayerwiseLRDecay(0.5)])
