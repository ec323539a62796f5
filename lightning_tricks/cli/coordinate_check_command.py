"""The command `coordinate-check`: a recipe's model at several widths, each trained for a few steps."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_tricks._errors import UsageError
from lightning_tricks._writable import check_file
from lightning_tricks.cli.recipe_cli import load_recipe
from lightning_tricks.commands.command_parser import CommandParser
from lightning_tricks.commands.coordinate_check import DEFAULT_TOLERANCE, CoordinateTrial, coordinate_check
from lightning_tricks.data.base import ShardData
from lightning_tricks.language_model import LanguageModel
from lightning_tricks.optim import build_optimizer
from lightning_tricks.optim.mup import at_width

DEFAULT_WIDTHS, DEFAULT_STEPS = "64,128,256,512,1024", 10
TOKENS = 256  # in a batch: sizes of activations are means over many numbers already
LONGEST_ROW = 128


def coordinate_check_command(args: Sequence[str]) -> None:
    """Print the sizes of activations over widths, and exit with 1 if some layer is not flat.

    Args:
        args: after the name of the command.

    Raises:
        UsageError: a recipe without LanguageModel or without data; a width that its heads do not fit; see
            `coordinate_check`.
    """
    options, recipe = _parse(args)
    module, data, _ = load_recipe(*recipe)
    if not isinstance(module, LanguageModel):
        raise UsageError(
            f"coordinate-check: model={type(module).__name__} is no LanguageModel, whose width a recipe gives: call "
            "lightning_tricks.coordinate_check from Python"
        )
    widths = _numbers(options.widths)
    shapes = {width: _shape(module, width) for width in widths}
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")

    def build(width: int, seed: int) -> CoordinateTrial:
        return _trial(module, shapes[width], seed, device or torch.device("cpu"))

    if options.steps < 1:
        raise UsageError(f"coordinate-check: steps={options.steps}: give at least 1")
    batches = _batches(data, options.steps)
    report = coordinate_check(build, batches, widths, options.seeds, options.tolerance)
    print(report)
    if options.json is not None:
        figures = {name: [sizes._asdict() for sizes in layer] for name, layer in report.layers.items()}
        text = json.dumps({"widths": report.widths, "steps": report.steps, "layers": figures}, indent=1)
        Path(options.json).write_text(text + "\n", encoding="utf-8")
    sys.exit(1 if report.failed else 0)


def _parse(args: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = CommandParser(
        "lightning-tricks coordinate-check",
        description="Train a recipe's decoder for a few steps at several widths, with heads of one width, the recipe's "
        "optimizer up to its peak learning rate and its data, and print how the output of each layer grows with the "
        "width: flat with muP. Other options are those of fit; --model.mup null shows the same without muP.",
        allow_abbrev=False,
    )
    parser.add_argument("--widths", default=DEFAULT_WIDTHS, help="with commas; default %(default)s")
    parser.add_argument("--steps", type=int, default=DEFAULT_STEPS, help="optimizer steps; default %(default)s")
    parser.add_argument("--seeds", type=int, default=1, help="models at each width; default %(default)s")
    parser.add_argument(
        "--tolerance", type=float, default=DEFAULT_TOLERANCE, help="largest slope of a flat layer; default %(default)s"
    )
    parser.add_argument("--json", metavar="FILE", help="for all figures")
    options, recipe = parser.parse_known_args(args)
    if not recipe:
        raise UsageError("coordinate-check: give a recipe with --config RECIPE.yaml")
    if options.json is not None:
        check_file("coordinate-check: json", options.json)
    return options, recipe


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"coordinate-check: widths={text}: give whole numbers with commas") from None


def _shape(module: LanguageModel, width: int) -> Any:
    """The recipe's decoder at another width: with more heads, or with wider ones where `base_head_dim` asks for it."""
    config, mup = module.config, module.mup
    if mup is not None and mup.base_head_dim not in (None, config.head_dim):
        if width < 1 or width % config.n_heads:
            raise UsageError(
                f"coordinate-check: widths: {width} cannot be split into the recipe's {config.n_heads} heads, which "
                f"mup.base_head_dim={mup.base_head_dim} widens: give multiples of {config.n_heads}"
            )
        return at_width(config, width, width // config.n_heads)
    if width < config.head_dim or width % config.head_dim:
        raise UsageError(
            f"coordinate-check: widths: {width} holds no whole number of the recipe's heads, which are "
            f"{config.head_dim} wide: give multiples, or a recipe with other n_heads"
        )
    return at_width(config, width, config.head_dim)


def _trial(module: LanguageModel, config: Any, seed: int, device: torch.device) -> CoordinateTrial:
    """A model of the recipe with another shape, and its optimizer."""
    torch.manual_seed(seed)
    model = LanguageModel(config, mup=module.mup)
    with device:
        model.configure_model()
    settings = (module.weight_decay, module.decay_embeddings, module.param_rules, module.mup)
    optimizer = build_optimizer(model, module.optimizer, *settings)

    def loss(batch: dict[str, Tensor]) -> Tensor:
        here = {name: tensor.to(device) for name, tensor in batch.items()}
        logits = model(here["input_ids"], here.get("document_ids"))
        return F.cross_entropy(logits.flatten(0, 1).float(), here["labels"].flatten())

    return CoordinateTrial(model, optimizer, loss)


def _batches(data: Any, steps: int) -> list[dict[str, Tensor]]:
    """The first rows of the recipe's training data, cut to a length that is enough."""
    if not isinstance(data, ShardData):
        kind = "none" if data is None else type(data).__name__
        raise UsageError(f"coordinate-check: data={kind}: give the recipe TextData or TokenData")
    data.prepare_data()
    data.setup("fit")
    rows, length = data.training_rows(), min(data.seq_len, LONGEST_ROW)
    count = max(1, TOKENS // length)
    batches = [[rows[step * count + row] for row in range(count)] for step in range(steps)]
    return [{name: torch.cat([row[name][:, :length] for row in batch]) for name in batch[0]} for batch in batches]
