"""The table of docs/parameter_roles.md, for `fill.py`: role and layout of the parameters of real layers."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from filler import Filler
from torch import nn
from torch.nn.utils import parametrizations

from lightning_tricks.optim import MatrixLayout, MuonAdamW, decay_groups, param_roles

TEXT = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2, "intermediate_size": 24}  # fmt: skip
IMAGE = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24, "image_size": 8,
         "patch_size": 4}  # fmt: skip


class Holder(nn.Module):
    """A module with the given parameters and submodules as attributes."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        for name, value in attributes.items():
            setattr(self, name, nn.Parameter(value) if isinstance(value, torch.Tensor) else value)


class Attention(Holder):
    """As timm's: queries, keys and values in one layer, and names that are to be left out of the decay."""

    def __init__(self) -> None:
        super().__init__(qkv=nn.Linear(16, 48), proj=nn.Linear(16, 16), cls_token=torch.zeros(1, 1, 16))

    def no_weight_decay(self) -> set[str]:
        """Named as in timm."""
        return {"cls_token"}


def exempt_linear() -> nn.Module:
    """A layer whose weight is marked as in mamba_ssm."""
    layer: Any = nn.Linear(16, 24)
    layer.weight._no_weight_decay = True
    return layer


def hf(model: str, config: str, **options: Any) -> nn.Module:
    """A model of transformers."""
    import transformers

    transformers.logging.set_verbosity_error()
    return getattr(transformers, model)(getattr(transformers, config)(**options))


def _mamba() -> nn.Module:
    sizes = {name: TEXT[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers")}
    return hf("MambaForCausalLM", "MambaConfig", **sizes, state_size=4)


def _deepseek() -> nn.Module:
    return hf(
        "DeepseekV3ForCausalLM", "DeepseekV3Config", **TEXT, moe_intermediate_size=12, n_routed_experts=4,
        num_experts_per_tok=2, n_group=2, topk_group=1, first_k_dense_replace=0, q_lora_rank=8, kv_lora_rank=8,
        qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4, num_key_value_heads=4,
    )  # fmt: skip


def _sam() -> nn.Module:
    eye = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "mlp_dim": 24, "image_size": 16,
           "patch_size": 4, "output_channels": 8, "window_size": 2, "global_attn_indexes": [0]}  # fmt: skip
    prompt = {"hidden_size": 8, "image_size": 16, "patch_size": 4, "mask_input_channels": 4}
    mask = {"hidden_size": 8, "mlp_dim": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "iou_head_hidden_dim": 8}
    return hf("SamModel", "SamConfig", vision_config=eye, prompt_encoder_config=prompt, mask_decoder_config=mask)


def _clip() -> nn.Module:
    text = {name: size for name, size in TEXT.items() if not name.endswith("_id")}
    return hf("CLIPModel", "CLIPConfig", text_config=text, vision_config=IMAGE, projection_dim=8)


def _swin(version: str) -> nn.Module:
    sizes = {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 2}
    return hf(f"Swin{version}ForImageClassification", f"Swin{version}Config", **sizes)


def _wav2vec2() -> nn.Module:
    return hf(
        "Wav2Vec2ForCTC", "Wav2Vec2Config", **TEXT, conv_dim=(8, 8), conv_stride=(2, 2), conv_kernel=(3, 3),
        num_feat_extract_layers=2, num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2,
    )  # fmt: skip


def _t5() -> nn.Module:
    return hf("T5ForConditionalGeneration", "T5Config", vocab_size=50, d_model=16, d_kv=4, d_ff=24, num_layers=1,
              num_heads=2)  # fmt: skip


def _lora() -> nn.Module:
    """As peft wraps a layer; with the magnitudes of DoRA."""
    adapters = {"A": nn.ModuleDict({"default": nn.Linear(16, 4, bias=False)}),
                "B": nn.ModuleDict({"default": nn.Linear(4, 24, bias=False)})}  # fmt: skip
    magnitude = nn.ModuleDict({"default": Holder(weight=torch.ones(24))})
    base = nn.Linear(16, 24).requires_grad_(False)
    return Holder(base_layer=base, lora_A=adapters["A"], lora_B=adapters["B"], lora_magnitude_vector=magnitude)


def _torchtitan_experts() -> nn.Module:
    experts = Holder(w1=torch.zeros(4, 24, 16), w2=torch.zeros(4, 16, 24), w3=torch.zeros(4, 24, 16))
    experts.is_transposed = False  # type: ignore[assignment]
    return Holder(router=Holder(gate=nn.Linear(16, 4, bias=False)), experts=experts)


def _causal(name: str, config: str = "", **options: Any) -> Callable[[], nn.Module]:
    return lambda: hf(f"{name}ForCausalLM", config or f"{name}Config", **TEXT, num_key_value_heads=2, **options)


def _gpt2() -> nn.Module:
    return hf("GPT2LMHeadModel", "GPT2Config", vocab_size=50, n_positions=8, n_embd=16, n_layer=1, n_head=2)


def _modernbert() -> nn.Module:
    return hf("ModernBertForMaskedLM", "ModernBertConfig", **TEXT, cls_token_id=1, sep_token_id=2)


def _convnext() -> nn.Module:
    sizes = {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2}
    return hf("ConvNextV2ForImageClassification", "ConvNextV2Config", **sizes)


# (layer, makes it or the model that has it, ends of the names of parameters)
LAYERS: list[tuple[str, Callable[[], nn.Module], str]] = [
    ("nn.Linear", lambda: nn.Linear(16, 24), "weight bias"),
    ("nn.Linear, marked `_no_weight_decay`", exempt_linear, "weight"),
    ("nn.Bilinear", lambda: nn.Bilinear(4, 6, 8), "weight"),
    ("nn.Conv1d", lambda: nn.Conv1d(8, 16, 3), "weight"),
    ("nn.Conv2d", lambda: nn.Conv2d(8, 16, 3), "weight"),
    ("nn.Conv2d, depthwise", lambda: nn.Conv2d(8, 8, 3, groups=8), "weight"),
    ("nn.ConvTranspose2d", lambda: nn.ConvTranspose2d(8, 16, 3), "weight"),
    ("nn.LSTM", lambda: nn.LSTM(8, 16), "weight_ih_l0 weight_hh_l0 bias_ih_l0"),
    ("nn.GRUCell", lambda: nn.GRUCell(8, 16), "weight_ih"),
    ("nn.MultiheadAttention", lambda: nn.MultiheadAttention(16, 2), "in_proj_weight out_proj.weight"),
    ("nn.Embedding", lambda: nn.Embedding(50, 16), "weight"),
    ("nn.EmbeddingBag (DLRM)", lambda: nn.EmbeddingBag(50, 16), "weight"),
    ("nn.LayerNorm", lambda: nn.LayerNorm(16), "weight bias"),
    ("nn.RMSNorm", lambda: nn.RMSNorm(16), "weight"),
    ("nn.GroupNorm", lambda: nn.GroupNorm(2, 16), "weight"),
    ("nn.BatchNorm2d", lambda: nn.BatchNorm2d(16), "weight"),
    ("nn.InstanceNorm2d(affine=True)", lambda: nn.InstanceNorm2d(16, affine=True), "weight"),
    ("nn.PReLU", lambda: nn.PReLU(16), "weight"),
    ("weight_norm(nn.Linear), by hooks", lambda: nn.utils.weight_norm(nn.Linear(16, 24)), "weight_g weight_v"),
    ("weight_norm(nn.Conv1d)", lambda: parametrizations.weight_norm(nn.Conv1d(8, 16, 3)), "original0 original1"),
    ("spectral_norm(nn.Linear)", lambda: parametrizations.spectral_norm(nn.Linear(16, 24)), "weight.original"),
    (
        "LoRA and DoRA, as in peft",
        _lora,
        "lora_A.default.weight lora_B.default.weight lora_magnitude_vector.default.weight",
    ),
    ("attention, as in timm", Attention, "qkv.weight proj.weight cls_token"),
    ("experts, as in torchtitan, with `is_transposed = False`", _torchtitan_experts, "gate.weight w1 w2"),
    ("GPT-2, with Conv1D", _gpt2, "wpe.weight attn.c_attn.weight mlp.c_fc.weight"),
    ("Llama", _causal("Llama"), "q_proj.weight input_layernorm.weight lm_head.weight"),
    ("Phi-3", _causal("Phi3"), "qkv_proj.weight gate_up_proj.weight"),
    ("Mixtral", _causal("Mixtral", num_local_experts=4), "mlp.gate.weight experts.gate_up_proj experts.down_proj"),
    ("Qwen3-MoE", _causal("Qwen3Moe", moe_intermediate_size=12, num_experts=4),
     "mlp.gate.weight experts.gate_up_proj q_norm.weight"),
    ("DeepSeek-V3", _deepseek, "kv_b_proj.weight mlp.gate.weight experts.gate_up_proj shared_experts.up_proj.weight"),
    ("GPT-OSS", _causal("GptOss", num_local_experts=4, head_dim=4),
     "router.weight experts.gate_up_proj experts.gate_up_proj_bias experts.down_proj sinks"),
    ("Llama 4", _causal("Llama4", "Llama4TextConfig", intermediate_size_mlp=24, num_local_experts=4, head_dim=4),
     "router.weight experts.gate_up_proj"),
    ("Mamba", _mamba, "A_log mixer.D conv1d.weight in_proj.weight x_proj.weight"),
    ("T5", _t5, "relative_attention_bias.weight shared.weight"),
    ("ModernBERT", _modernbert, "Wqkv.weight Wi.weight"),
    ("ViT", lambda: hf("ViTForImageClassification", "ViTConfig", **IMAGE),
     "position_embeddings patch_embeddings.projection.weight classifier.weight"),
    ("CLIP", _clip, "visual_projection.weight text_projection.weight class_embedding logit_scale"),
    ("SAM", _sam, "attn.rel_pos_h vision_encoder.pos_embed attn.qkv.weight"),
    ("Swin", lambda: _swin(""), "relative_position_bias_table"),
    ("Swin v2", lambda: _swin("v2"), "attention.self.logit_scale"),
    ("ConvNeXt v2", _convnext, "grn.weight dwconv.weight"),
    ("Wav2Vec 2.0", _wav2vec2, "pos_conv_embed.conv.parametrizations.weight.original0 "
                               "pos_conv_embed.conv.parametrizations.weight.original1"),
]  # fmt: skip


def in_a_model(layer: nn.Module) -> nn.Module:
    """The layer in a block beside another one, so that it is no output head and Muon has a matrix."""
    return Holder(blocks=nn.ModuleList([Holder(layer=layer, another=nn.Linear(16, 20))]), head=nn.Linear(16, 4))


def rows() -> Iterator[tuple[str, ...]]:
    """Layer, parameter, shape, role, decay, optimizer and layout of each parameter."""
    for layer, make, ends in LAYERS:
        made = make()
        model = made if "transformers" in type(made).__module__ else in_a_model(made)
        params = param_roles(model)
        groups = decay_groups(model)
        decays = {name: group["weight_decay"] > 0 for group in groups for name in group["param_names"]}
        usable = [group | {"layouts": [_known(layout) for layout in group["layouts"]]} for group in groups]
        steps = {name: group["optimizer"] for group in MuonAdamW(usable).param_groups for name in group["param_names"]}
        for end in ends.split():
            param = next(param for param in params if param.name.endswith(end))
            decay = "exempt" if param.exempt else "yes" if decays[param.name] else "no"
            shape = "x".join(map(str, param.param.shape)) or "scalar"
            optimizer = {"muon": "Muon", "adamw": "AdamW"}[steps[param.name]]
            if param.layout is not None and param.layout.parts is None:
                optimizer = "refused"
            yield layer, f"`{end}`", shape, param.role, decay, optimizer, _in_words(param.layout)


def _known(layout: dict[str, Any] | None) -> dict[str, Any] | None:
    """MuonAdamW refuses a fused projection of unknown parts; the table is of other weights."""
    return layout if layout is None or layout["parts"] is not None else {**layout, "parts": ()}


def _in_words(layout: MatrixLayout | None) -> str:
    if layout is None:
        return ""
    sizes = " + ".join(map(str, layout.parts or (layout.outputs,)))
    alternate = ", alternating" if layout.interleaved else ", parts not known" if layout.parts is None else ""
    stack = f"{layout.shape[0]} of " if layout.stacked else ""
    return f"{stack}{sizes} from {layout.inputs}{alternate}"


def texts(_: None) -> dict[str, str]:
    """The table by the name of its place in the page."""
    lines = ["| layer | parameter | shape | role | decays | MuonAdamW | matrices: outputs from inputs |"]
    lines.append("|---|---|---|---|---|---|---|")
    before = None
    for layer, *cells in rows():
        lines.append(f"| {'' if layer == before else layer} | {' | '.join(cells)} |")
        before = layer
    return {"layers": "\n".join(lines)}


FILLERS = {
    "layers": Filler("parameter_roles.md", texts, measured=False),
}
