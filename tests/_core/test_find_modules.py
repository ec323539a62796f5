"""Which modules count as a model's blocks, and which ones a pattern of their names finds."""

import pytest
import torch
import transformers
from harness.models import LLAMA
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.find_modules import find_blocks, match_modules, named_submodules, repeated_blocks
from lightning_tricks.models import Decoder


class Layer(nn.Module):
    """A block with three experts: a list inside a list."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))

    def forward(self, x):
        return self.experts[0](x)


def model(**parts: nn.Module) -> nn.Module:
    root = nn.Module()
    for name, part in parts.items():
        root.add_module(name, part)
    return root


def layers(count: int) -> nn.ModuleList:
    return nn.ModuleList(Layer() for _ in range(count))


class Stage(nn.Module):
    """A level of a U-Net: two blocks of one width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(2))


def linears(count: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(2, 2) for _ in range(count)))


def with_a_norm() -> nn.ModuleList:
    found = layers(2)
    found[0].norm = nn.LayerNorm(2)
    return found


def of_unknown_shape(*members: nn.Module, flat: bool = False) -> nn.ModuleList:
    for member in members:
        for param in member.parameters():
            param._fsdp_flattened = flat
    return nn.ModuleList(members)


STAGES = [f"{place}.{stage}.blocks" for place, number in (("down", 3), ("up", 2)) for stage in range(number)]
TWO = ["layers.0", "layers.1"]
FOUND = {
    "a decoder's blocks": ({"net": Decoder(LLAMA)}, ["net.blocks.0", "net.blocks.1"]),
    "no list inside a block": ({"layers": layers(2)}, TWO),
    "every list of blocks, and no longer one of single layers": (
        {"head": linears(6), "encoder": layers(2), "decoder": layers(2)},
        ["encoder.0", "encoder.1", "decoder.0", "decoder.1"],
    ),
    "single layers where there is nothing else": ({"head": linears(6)}, [f"head.{place}" for place in range(6)]),
    "blocks of stages of different widths": (
        {"down": nn.ModuleList([Stage(2), Stage(4), Stage(8)]), "up": nn.ModuleList([Stage(6), Stage(3)])},
        [f"{place}.{block}" for place in STAGES for block in range(2)],
    ),
    "more parameters in one, as the first block of T5 has": ({"layers": with_a_norm()}, TWO),
    "lazy parameters": ({"layers": of_unknown_shape(nn.LazyLinear(2), nn.LazyLinear(3))}, TWO),
    "flat parameters": ({"layers": of_unknown_shape(nn.Linear(2, 2), nn.Linear(2, 3), flat=True)}, TWO),
    "a list of one": ({"embed": nn.Embedding(2, 2), "one": nn.ModuleList([nn.Linear(2, 2)])}, ["embed", "one"]),
    "two classes": (
        {"embed": nn.Embedding(2, 2), "mixed": nn.Sequential(nn.Linear(2, 2), nn.Tanh())}, ["embed", "mixed"],
    ),
    "no parameters": (
        {"embed": nn.Embedding(2, 2), "metrics": nn.ModuleList([nn.Tanh(), nn.Tanh()])}, ["embed"],
    ),
    "parts at the first fork, where nothing is repeated": (
        {"net": model(first=nn.Linear(2, 2), act=nn.Tanh(), second=nn.Linear(2, 2)), "loss": nn.MSELoss()},
        ["net.first", "net.second"],
    ),
    "a lone layer": ({"layer": nn.Linear(2, 2)}, ["layer"]),
    "nothing in an empty module": ({}, []),
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
def test_blocks(name):
    parts, names = FOUND[name]
    assert list(find_blocks(model(**parts))) == names


SMALL = {"vocab_size": 64, "d_model": 32}
WIDTHS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
HALVES = {
    **SMALL, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2,
}  # fmt: skip
# Each model with the lists that hold its blocks.
MODELS = {
    "torch": (lambda hf: nn.Transformer(32, 2, 2, 2, 64, batch_first=True), ["encoder.layers", "decoder.layers"]),
    "t5": (
        lambda hf: hf.T5Model(hf.T5Config(**SMALL, d_kv=16, d_ff=64, num_layers=2, num_heads=2)),
        ["encoder.block", "decoder.block"],
    ),
    "whisper": (
        lambda hf: hf.WhisperModel(hf.WhisperConfig(**HALVES, pad_token_id=0, max_source_positions=16)),
        ["encoder.layers", "decoder.layers"],
    ),
    "vit": (lambda hf: hf.ViTModel(hf.ViTConfig(**WIDTHS, image_size=8, patch_size=4)), ["layers"]),
    "mixtral": (
        lambda hf: hf.MixtralModel(
            hf.MixtralConfig(**WIDTHS, vocab_size=64, num_key_value_heads=2, num_local_experts=4)
        ),
        ["layers"],
    ),
    "swin": (
        lambda hf: hf.SwinModel(
            hf.SwinConfig(embed_dim=8, depths=[2, 2, 2], num_heads=[1, 2, 4], image_size=32, window_size=2)
        ),
        [f"encoder.layers.{stage}.blocks" for stage in range(3)],
    ),
    "resnet": (
        lambda hf: hf.ResNetModel(hf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2])),
        [f"encoder.stages.{stage}.layers" for stage in range(2)],
    ),
    "mlp": (lambda hf: nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8)), []),
}


@pytest.mark.parametrize("name", MODELS)
def test_blocks_of_models_we_did_not_write(name):
    build, lists = MODELS[name]
    with torch.device("meta"):
        root = build(transformers)
    assert list(repeated_blocks(root)) == [f"{path}.{place}" for path in lists for place in range(2)]


def test_wrappers_do_not_change_names_and_stand_for_what_they_wrap():
    wrapped = nn.ModuleList([checkpoint_wrapper(Layer()), torch.compile(Layer(), backend="eager")])
    blocks = find_blocks(model(layers=wrapped))
    assert list(blocks) == ["layers.0", "layers.1"]
    assert list(blocks.values()) == list(wrapped)
    parts = find_blocks(torch.compile(model(first=nn.Linear(2, 2), second=nn.Linear(2, 2)), backend="eager"))
    assert list(parts) == ["first", "second"]
    assert "layers.0.experts.2" in named_submodules(model(layers=wrapped))


def test_patterns_match_whole_names():
    root = model(net=Decoder(LLAMA))
    assert list(match_modules(root, [r"net\.blocks\.\d"], "o")) == ["net.blocks.0", "net.blocks.1"]
    assert list(match_modules(root, ["net.blocks.1.mlp", "net.embed"], "o")) == ["net.embed", "net.blocks.1.mlp"]


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("blocks", r"o: pattern 'blocks' matches no submodule: give whole names such as net\.blocks\.0"),
        ("(", r"o: pattern '\(' is no regular expression: missing \)"),
    ],
)
def test_a_pattern_that_finds_nothing_is_an_error(pattern, message):
    with pytest.raises(UsageError, match=message):
        match_modules(model(net=Decoder(LLAMA)), ["net", pattern], "o")
