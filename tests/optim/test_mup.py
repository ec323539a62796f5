"""MuP: the factors of each role and optimizer by hand, models that are not ours, a base model that stays as it is."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_tricks._core.errors import UsageError
from lightning_tricks.language_model import LanguageModel
from lightning_tricks.models import GPT2, Llama
from lightning_tricks.optim import LayerwiseLRDecay, MuonAdamW, MuP, ParamRule, build_optimizer
from lightning_tricks.optim.mup import at_width

SHAPE = {"vocab_size": 61, "n_layers": 2, "max_seq_len": 16}
LLAMA = Llama(**SHAPE, d_model=64, n_heads=8, n_kv_heads=4, activation="relu2")  # 4 times the base of 16
IDS = torch.randint(61, (2, 16), generator=torch.Generator().manual_seed(1))


def model(config=LLAMA, mup=None, seed=0, **options):
    torch.manual_seed(seed)
    module = LanguageModel(config, mup=mup, **options)
    module.configure_model()
    return module


def adamw(groups):
    return torch.optim.AdamW(groups, lr=0.5)


def sgd(groups):
    return torch.optim.SGD(groups, lr=0.5)


def settings(module, optimizer=adamw, **options):
    """lr and decay of each parameter, over those of the recipe: 0.5 and 0.1."""
    built = build_optimizer(module, optimizer, mup=module.mup, **options)
    return {
        name: (group["lr"] / 0.5, group["weight_decay"] / 0.1)
        for group in built.param_groups
        for name in group["param_names"]
    }


def of_kinds(found):
    """The factors of each kind of parameter of the first block and outside of blocks."""
    return {name.removeprefix("decoder."): pair for name, pair in found.items() if "blocks.1" not in name}


# ---- the table


def test_adam_gives_hidden_matrices_lr_over_the_ratio_and_decay_times_it():
    found = of_kinds(settings(model(mup=MuP(16))))
    matrices = {f"blocks.0.{part}.weight" for part in ("attn.q", "attn.k", "attn.v", "attn.o", "mlp.up", "mlp.down")}
    assert found == {
        "embed.weight": (1.0, 1.0),
        "head.weight": (1.0, 1.0),
        **dict.fromkeys(matrices, (0.25, 4.0)),
        **dict.fromkeys(("blocks.0.attn_norm.weight", "blocks.0.mlp_norm.weight", "norm.weight"), (1.0, 0.0)),
    }


def test_each_matrix_has_the_ratio_of_its_own_inputs():
    wide = Llama(**SHAPE, d_model=512, n_heads=8)  # d_ff is rounded up to 1536, and to 512 in the base model of 128
    found = of_kinds(settings(model(wide, MuP(128))))
    assert found["blocks.0.mlp.up.weight"][0] == 128 / 512
    assert found["blocks.0.mlp.down.weight"] == (pytest.approx(512 / 1536), pytest.approx(1536 / 512))


def test_sgd_has_the_other_table():
    found = of_kinds(settings(model(GPT2(**SHAPE, d_model=64, n_heads=8, tie_embeddings=False), MuP(16)), sgd))
    assert found["blocks.0.mlp.up.weight"] == (1.0, 1.0)
    assert found["blocks.0.mlp.up.bias"] == (4.0, 0.0)
    assert found["embed.weight"] == found["positions.weight"] == found["head.weight"] == (4.0, 0.25)
    assert found["norm.weight"] == (4.0, 0.0)


@pytest.mark.parametrize(("muon_lr", "factor"), [(None, 0.5), (0.5, 1.0)])
def test_muon_has_the_square_root_where_its_update_grows_with_the_matrix(muon_lr, factor):
    found = of_kinds(settings(model(mup=MuP(16)), lambda groups: MuonAdamW(groups, lr=0.5, muon_lr=muon_lr)))
    assert found["blocks.0.attn.q.weight"] == found["blocks.0.mlp.up.weight"] == (factor, 1 / factor)
    assert found["embed.weight"] == found["head.weight"] == (1.0, 1.0)


def test_factors_multiply_those_of_rules():
    rules = [ParamRule("mlp", lr_scale=3.0, weight_decay=0.2), LayerwiseLRDecay(0.5)]
    found = of_kinds(settings(model(mup=MuP(16)), rules=rules))
    assert found["blocks.0.mlp.up.weight"] == (0.75, pytest.approx(8.0))
    assert found["blocks.0.attn.q.weight"] == (0.25 * 0.5**2, 4.0)
    assert found["embed.weight"] == (0.5**3, 1.0)


# ---- initial weights and multipliers


def test_hidden_matrices_start_smaller_by_the_root_of_the_ratio_and_the_rest_as_in_the_base():
    plain, scaled = (dict(model(mup=mup).named_parameters()) for mup in (None, MuP(16)))
    for name, weight in scaled.items():
        factor = 0.5 if ".attn." in name or ".mlp." in name else 1.0
        torch.testing.assert_close(weight, plain[name] * factor)


def test_the_mlps_output_starts_by_the_ratio_of_its_own_inputs():
    wide = Llama(**SHAPE, d_model=256, n_heads=8)  # d_ff is rounded up to 768, and to 256 in the base model of 64
    plain, scaled = model(wide).decoder.blocks[0].mlp, model(wide, MuP(64)).decoder.blocks[0].mlp
    torch.testing.assert_close(scaled.down.weight, plain.down.weight / 3**0.5)
    torch.testing.assert_close(scaled.up.weight, plain.up.weight / 4**0.5)


@pytest.mark.parametrize("config", [LLAMA, GPT2(**SHAPE, d_model=64, n_heads=8)], ids=["llama", "gpt2-tied"])
def test_at_the_base_width_nothing_changes_to_the_bit(config):
    weights = []
    for mup in (None, MuP(64), MuP(64, base_head_dim=8)):
        module = model(config, mup)
        optimizer = build_optimizer(module, adamw, mup=mup)
        for _ in range(2):
            optimizer.zero_grad()
            module.decoder(IDS, labels=IDS).backward()
            optimizer.step()
        names = [(group["name"], group["param_names"]) for group in optimizer.param_groups]
        weights.append((names, [param.detach().clone() for param in module.parameters()], module(IDS)))
    for names, params, logits in weights[1:]:
        assert names == weights[0][0]
        assert all(torch.equal(one, other) for one, other in zip(params, weights[0][1], strict=True))
        assert torch.equal(logits, weights[0][2])


def test_logits_are_multiplied_by_base_width_over_width_in_every_path():
    plain, scaled = model(), model(mup=MuP(16))
    scaled.load_state_dict(plain.state_dict())
    torch.testing.assert_close(scaled(IDS), plain(IDS) / 4)
    expected = F.cross_entropy((plain(IDS) / 4).flatten(0, 1), IDS.flatten(), reduction="sum")
    torch.testing.assert_close(scaled.decoder(IDS, labels=IDS), expected)


def test_attention_is_scaled_by_one_over_the_width_of_a_head_against_that_of_the_base():
    wide = Llama(**SHAPE, d_model=64, n_heads=2)  # heads of 32, in the base of 8
    scaled = model(wide, MuP(16, base_head_dim=8))
    assert scaled.base_config.n_heads == 2
    for block in scaled.decoder.blocks:
        assert block.attn.scale == pytest.approx(math.sqrt(8) / 32)
    assert model(wide, MuP(32)).decoder.blocks[0].attn.scale is None


# ---- models that are not ours


def test_another_width_keeps_heads_key_heads_and_mlp_in_proportion():
    assert at_width(LLAMA, 16, 8) == Llama(**SHAPE, d_model=16, n_heads=2, n_kv_heads=1, activation="relu2")
    one_key_head = Llama(**SHAPE, d_model=64, n_heads=8, n_kv_heads=1, d_ff=96)
    assert at_width(one_key_head, 32, 8) == Llama(**SHAPE, d_model=32, n_heads=4, n_kv_heads=1, d_ff=48)


class WithBase(nn.Module):
    """A module that knows the shapes of its base model: made by the same function with the base's sizes."""

    def __init__(self, make, sizes, base):
        super().__init__()
        self.net, self.make, self.base = make(**sizes), make, base

    def base_shapes(self):
        return {name: param.shape for name, param in WithBase(self.make, self.base, self.base).named_parameters()}


def llama(width, inner):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=61, hidden_size=width, intermediate_size=inner, num_hidden_layers=2, num_attention_heads=width // 8,
        num_key_value_heads=width // 16, tie_word_embeddings=False,
    ))  # fmt: skip


def test_a_llama_of_transformers_has_the_factors_of_its_declared_shapes():
    sizes, mup = {"width": 64, "inner": 128}, MuP(16)
    module, plain = (WithBase(llama, sizes, {"width": 16, "inner": 32}) for _ in range(2))
    mup.scale_initial_weights(module)
    optimizer = build_optimizer(module, adamw, mup=mup)
    before, after = dict(plain.named_parameters()), dict(module.named_parameters())
    for group in optimizer.param_groups:
        for name in group["param_names"]:
            hidden = ".self_attn." in name or ".mlp." in name
            assert group["lr"] == 0.5 * (0.25 if hidden else 1.0), name
            decay = 0.0 if "norm" in name else 0.1
            assert group["weight_decay"] == pytest.approx(decay * (4 if hidden else 1)), name
            torch.testing.assert_close(after[name], before[name] * (0.5 if hidden else 1.0))


def net(width):
    """Torch's own initial weights, a stem whose input does not grow, filters of one channel, experts and a router."""
    made = nn.ModuleDict({"stem": nn.Conv2d(3, width, 4), "deep": nn.Conv1d(width, width, 3, groups=width)})
    made["gate"], made["experts"] = nn.Linear(width, 4), nn.ModuleList([nn.Linear(width, width) for _ in range(4)])
    made["head"] = nn.Linear(width, 10)
    return made


def test_inputs_that_do_not_grow_keep_the_rate_and_torchs_own_weights_are_by_fan_in():
    module, mup = WithBase(net, {"width": 32}, {"width": 8}), MuP(8)
    before = copy.deepcopy(module.state_dict())
    mup.scale_initial_weights(module, drawn="by_fan_in")
    optimizer = build_optimizer(module, adamw, mup=mup)
    lrs = {name[4:]: group["lr"] / 0.5 for group in optimizer.param_groups for name in group["param_names"]}
    assert lrs["stem.weight"] == lrs["stem.bias"] == lrs["deep.weight"] == lrs["experts.0.bias"] == 1.0
    assert lrs["experts.0.weight"] == lrs["gate.weight"] == 0.25
    assert lrs["head.weight"] == 1.0
    changed = {name: weight for name, weight in module.state_dict().items() if not torch.equal(weight, before[name])}
    assert list(changed) == ["net.head.weight"]
    torch.testing.assert_close(changed["net.head.weight"], before["net.head.weight"] * 2)


def test_a_matrix_without_decay_keeps_its_factor_and_its_optimizer():
    module, marked = model(mup=MuP(16)), "decoder.blocks.0.mlp.up.weight"
    module.get_parameter(marked)._no_weight_decay = True
    for optimizer, factor in ((adamw, 1 / 4), (lambda groups: MuonAdamW(groups, lr=0.5), 4**-0.5)):
        built = build_optimizer(module, optimizer, mup=module.mup)
        (group,) = [group for group in built.param_groups if marked in group["param_names"]]
        assert (group["lr"], group["weight_decay"]) == (pytest.approx(0.5 * factor), 0.0)
        assert group.get("optimizer") in (None, "muon")


# ---- wrong input


def without_shapes():
    module = model(mup=MuP(16))
    module.base_shapes = dict
    return module


def on_meta():
    return WithBase(net, {"width": 32}, {"width": 8}).to("meta")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: MuP(base_width=0), r"MuP\.base_width=0: give a whole number of at least 1"),
        (lambda: MuP(base_width=8, base_head_dim=2.5), r"MuP\.base_head_dim=2\.5"),
        (lambda: model(mup=MuP(12)), r"MuP\.base_width=12 holds no whole number of heads 8 wide"),
        (lambda: model(mup=MuP(64, base_head_dim=16)), r"MuP\.base_head_dim=16: the decoder has the base width 64 and"),
        (lambda: build_optimizer(model(mup=MuP(16)), torch.optim.Adagrad, mup=MuP(16)), "MuP has no rule for Adagrad"),
        (lambda: build_optimizer(net(32), mup=MuP(8)), "MuP: ModuleDict does not tell its base model: define"),
        (lambda: build_optimizer(without_shapes(), mup=MuP(16)), r"MuP: base_shapes\(\) has no shape of 2"),
        (lambda: MuP(8).scale_initial_weights(on_meta(), drawn="once"), ".*drawn='once': give constant or by_fan_in"),
        (lambda: MuP(8).scale_initial_weights(on_meta()), ".*: WithBase is on the meta device"),
    ],
)
def test_what_cannot_be_scaled_is_refused_in_one_line(call, words):
    with pytest.raises(UsageError, match=rf"^{words}[^\n]*$"):
        call()
