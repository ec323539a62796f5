"""Roles: what each parameter is for, seen through types, names, wrappers and ties."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from lightning_tricks._core.errors import UsageError
from lightning_tricks.optim import param_roles


def roles(module):
    """The role of each parameter by its name; of an exempt one, `exempt matrix` and the like."""
    return {param.name: f"exempt {param.role}" if param.exempt else param.role for param in param_roles(module)}


def by_role(module):
    """The names of the parameters of each role, in their order."""
    found = {}
    for name, role in roles(module).items():
        found.setdefault(role, []).append(name)
    return found


class Holder(nn.Module):
    """A module with the given parameters and submodules as attributes."""

    def __init__(self, **attributes):
        super().__init__()
        for name, value in attributes.items():
            setattr(self, name, nn.Parameter(value) if isinstance(value, torch.Tensor) else value)


NORMS = [
    nn.LayerNorm(4), nn.RMSNorm(4), nn.GroupNorm(2, 4), nn.BatchNorm1d(4), nn.BatchNorm2d(4), nn.SyncBatchNorm(4),
    nn.InstanceNorm2d(4, affine=True), nn.LayerNorm((3, 4)),
]  # fmt: skip


@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: repr(norm).splitlines()[0])
def test_norms_are_known_by_type_whatever_their_shape(norm):
    assert set(roles(Holder(inner=norm)).values()) == {"norm"}


def test_another_layers_scale_is_a_norm_by_the_name_of_the_layer():
    module = Holder(input_layernorm=Holder(weight=torch.ones(3, 4)), scaler=Holder(weight=torch.ones(3, 4)))
    assert roles(module) == {"input_layernorm.weight": "norm", "scaler.weight": "matrix"}


def test_raw_norm_parameters_of_stacked_blocks_are_known_by_name():
    module = Holder(attn_norm=torch.ones(3, 4), norm_weight=torch.ones(3, 4), normal=torch.ones(3, 4))
    assert roles(module) == {"attn_norm": "norm", "norm_weight": "norm", "normal": "matrix"}


def test_biases_are_known_by_name_whatever_their_shape():
    names = ["bias", "gate_up_proj_bias", "relative_bias_table"]  # of experts, (experts, out)
    lists = {name: nn.ParameterList([nn.Parameter(torch.zeros(2, 2))]) for name in ("biases", "weights")}
    module = Holder(**{name: torch.zeros(3, 5) for name in [*names, "unbiased"]}, **lists)
    assert by_role(module) == {"bias": [*names, "biases.0"], "matrix": ["unbiased", "weights.0"]}


def test_torchs_own_layers_fall_as_they_should():
    attention, lstm = nn.MultiheadAttention(4, 2, add_bias_kv=True), nn.LSTM(2, 3)
    biases = ["in_proj_bias", "bias_k", "bias_v", "out_proj.bias"]
    assert sorted(by_role(Holder(attention=attention, lstm=lstm))["bias"]) == sorted(
        [*(f"attention.{name}" for name in biases), "lstm.bias_ih_l0", "lstm.bias_hh_l0"]
    )
    assert roles(nn.Conv2d(1, 2, 3)) == {"weight": "matrix", "bias": "bias"}


def test_embeddings_matrices_and_vectors():
    module = Holder(
        embed=nn.Embedding(3, 2), bag=nn.EmbeddingBag(3, 2), head=nn.Linear(2, 3, bias=False),
        experts=torch.zeros(4, 2, 3), gain=torch.ones(2), temperature=torch.tensor(1.0),
    )  # fmt: skip
    assert by_role(module) == {
        "embedding": ["embed.weight", "bag.weight"], "head": ["head.weight"], "expert": ["experts"],
        "vector": ["gain", "temperature"],
    }  # fmt: skip


def test_a_tied_parameter_comes_once_under_its_first_name_and_first_role():
    module = Holder(head=nn.Linear(2, 3, bias=False), embed=nn.Embedding(3, 2))
    module.embed.weight = module.head.weight
    assert roles(module) == {"head.weight": "embedding"}


def test_a_recurrences_parameters_are_known_by_name_whatever_their_shape():
    mamba = Holder(A_log=torch.zeros(4, 2), D=torch.ones(2, 2), dt_bias=torch.ones(2, 2), conv=nn.Conv1d(2, 2, 3))
    both_ways = Holder(A_b_log=torch.zeros(4, 2), D_b=torch.ones(2, 2))
    rwkv = Holder(time_decay=torch.zeros(2, 2), time_mix_key=torch.zeros(1, 1, 2), time_proj=torch.zeros(2, 2))
    assert by_role(Holder(mamba=mamba, both_ways=both_ways, rwkv=rwkv, D=torch.ones(2, 2))) == {
        "matrix": ["D", "mamba.conv.weight", "rwkv.time_proj"],  # the first D stands beside no A_log
        "bias": ["mamba.conv.bias"],
        "state": ["mamba.A_log", "mamba.D", "mamba.dt_bias", "both_ways.A_b_log", "both_ways.D_b", "rwkv.time_decay",
                  "rwkv.time_mix_key"],
    }  # fmt: skip


def test_raw_tokens_and_positions_are_embeddings():
    names = [
        "cls_token", "reg_token", "register_tokens", "dist_token", "distillation_token", "mask_token", "pos_embed",
        "absolute_pos_embed", "position_embeddings", "positional_embedding", "pos_embed_window", "query_tokens",
    ]  # fmt: skip
    others = ["token_mixing", "embed_proj", "positive", "text_projection"]
    found = roles(Holder(**{name: torch.zeros(1, 2, 4) for name in names + others}, token=torch.zeros(4)))
    assert found == dict.fromkeys(names, "embedding") | dict.fromkeys(others, "expert") | {"token": "vector"}


class VisionTransformer(Holder):
    """Named and shaped as timm's, whose models of one family share a list of names."""

    def __init__(self):
        super().__init__(
            cls_token=torch.zeros(1, 1, 4), pos_embed=torch.zeros(1, 5, 4), head=nn.Linear(4, 2),
            blocks=nn.ModuleList([Holder(cpb_mlp=nn.Linear(2, 2), scale=torch.zeros(2, 1), gain=torch.ones(2, 2))]),
        )  # fmt: skip

    def no_weight_decay(self):
        return {"pos_embed", "cls_token", "dist_token", "blocks.0.cpb_mlp", "*.scale"}


@pytest.mark.parametrize("compiled", [False, True])
def test_the_method_no_weight_decay_exempts_names_modules_and_patterns_seen_from_its_module(compiled):
    net = VisionTransformer()
    assert by_role(Holder(net=torch.compile(net) if compiled else net)) == {
        "exempt embedding": ["net.cls_token", "net.pos_embed"], "head": ["net.head.weight"],
        "bias": ["net.head.bias"], "exempt vector": ["net.blocks.0.scale"], "matrix": ["net.blocks.0.gain"],
        "exempt matrix": ["net.blocks.0.cpb_mlp.weight"], "exempt bias": ["net.blocks.0.cpb_mlp.bias"],
    }  # fmt: skip


SMALL = {"hidden_size": 8, "num_hidden_layers": 1, "vocab_size": 16}


def test_roles_in_models_of_transformers():
    import transformers as hf

    mamba = roles(hf.MambaModel(hf.MambaConfig(**SMALL, state_size=4)))
    assert {mamba[f"layers.0.mixer.{name}"] for name in ("A_log", "D")} == {"state"}
    mamba2 = roles(hf.Mamba2Model(hf.Mamba2Config(**SMALL, num_heads=2, head_dim=8, state_size=4, n_groups=1)))
    assert {mamba2[f"layers.0.mixer.{name}"] for name in ("A_log", "D", "dt_bias")} == {"state"}
    t5 = roles(hf.T5Model(hf.T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, vocab_size=16)))
    assert t5["encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"] == "bias"
    assert t5["shared.weight"] == "embedding"
    image = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    vit = roles(hf.ViTModel(hf.ViTConfig(**image, image_size=8, patch_size=4), use_mask_token=True))
    tokens = {vit[f"embeddings.{name}"] for name in ("cls_token", "mask_token", "position_embeddings")}
    assert tokens == {"embedding"}
    assert vit["embeddings.patch_embeddings.projection.weight"] == "matrix"


def test_names_and_roles_are_those_of_the_plain_model_under_compile_and_checkpointing():
    plain = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.LayerNorm((2, 2)))
    plain[0].weight._no_weight_decay = True
    expected = roles(plain)
    wrapped = nn.Sequential(torch.compile(plain[0]), checkpoint_wrapper(plain[1]), checkpoint_wrapper(plain[2]))
    assert any("_orig_mod" in name for name, _ in wrapped.named_parameters())
    assert roles(wrapped) == expected
    assert roles(torch.compile(wrapped)) == expected


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_parameters_flattened_by_fsdp1_are_refused_in_one_line(tmp_path, use_orig_params):
    from torch.distributed.fsdp import FullyShardedDataParallel

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    sharded = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=use_orig_params)
    for module in (sharded, model):
        with pytest.raises(UsageError, match=r"^parameter '[^\n]*' was flattened by FSDP1[^\n]*FSDP2[^\n]*$"):
            roles(module)


class Classifier(nn.Module):
    """As a model of timm."""

    def __init__(self):
        super().__init__()
        self.features, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def get_classifier(self):
        return self.last


class Backbone(Holder):
    """Its methods find no head: as in transformers, where a class does not know it, and of another kind."""

    def get_output_embeddings(self):
        raise NotImplementedError

    def get_classifier(self, name):
        return self


@pytest.mark.parametrize(
    ("model", "heads"),
    [
        (Holder(body=nn.Linear(4, 4), lm_head=nn.Linear(4, 9)), {"lm_head.weight"}),
        (Holder(blocks=nn.ModuleList([Holder(head=nn.Linear(4, 4))]), unembed=nn.Linear(4, 9)), {"unembed.weight"}),
        (Holder(head=Holder(fc=nn.Linear(4, 9)), body=nn.Linear(4, 4)), {"head.fc.weight"}),
        (Classifier(), {"last.weight"}),
        (Backbone(body=nn.Linear(4, 4), head=nn.Linear(4, 2)), {"head.weight"}),
        (nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), {"2.weight"}),
        (Holder(layer1=nn.ModuleList([Holder(conv=nn.Conv2d(3, 3, 3))]), fc=nn.Linear(3, 2)), {"fc.weight"}),
        (Holder(blocks=nn.ModuleList([Holder(up=nn.Linear(4, 4))])), set()),  # a backbone has no head
        (nn.Linear(4, 4), set()),
    ],
)
def test_output_heads(model, heads):
    assert {name for name, role in roles(model).items() if role == "head"} == heads


def test_experts_and_routers():
    expert = Holder(up=nn.Linear(8, 8), gate=nn.Linear(8, 8))  # the gate of a gated MLP
    block = Holder(gate=nn.Linear(8, 4), experts=nn.ModuleList([expert]), w1=torch.zeros(4, 8, 8),
                   conv=nn.Conv1d(8, 8, 3), other=nn.Linear(8, 6))  # fmt: skip
    raw = Holder(w1=torch.zeros(4, 8, 8), gate=nn.Linear(8, 4))
    others = [Holder(router=Holder(weight=torch.zeros(4, 8)), gate=nn.Linear(8, 8)), raw]
    found = by_role(Holder(blocks=nn.ModuleList([block, *others])))
    assert sorted(found["router"]) == ["blocks.0.gate.weight", "blocks.1.router.weight", "blocks.2.gate.weight"]
    assert sorted(found["matrix"]) == ["blocks.0.conv.weight", "blocks.0.other.weight", "blocks.1.gate.weight"]
    assert sorted(found["expert"]) == [
        "blocks.0.experts.0.gate.weight", "blocks.0.experts.0.up.weight", "blocks.0.w1", "blocks.2.w1",
    ]  # fmt: skip


def exempting(answer):
    net = nn.Linear(2, 2)
    net.no_weight_decay = lambda: answer
    return Holder(net=net)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (exempting("pos_embed"), r"no_weight_decay\(\) of module 'net' is 'pos_embed': give a collection"),
        (exempting([torch.zeros(2, 2)]), r"no_weight_decay\(\) of module 'net' is \[tensor\(.*: give a collection"),
        (nn.Sequential(nn.LazyLinear(3)), r"parameter '0\.weight' has no shape yet"),
        (nn.Linear(2, 2).requires_grad_(False), "Linear has no trainable parameter"),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_line(model, words):
    with pytest.raises(UsageError, match=rf"^{words}[^\n]*$"):
        roles(model)
