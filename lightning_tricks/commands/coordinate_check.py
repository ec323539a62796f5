"""`coordinate-check`: whether activations keep their size while a model grows wider and trains.

First the check of any parametrization, from Python; then the command, of a recipe's decoder.
"""

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import linear_regression
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.find_modules import named_submodules, repeated_blocks
from lightning_tricks.commands.answers import check_json, write_json
from lightning_tricks.data.base import TokenDataModule
from lightning_tricks.language_model import LanguageModel
from lightning_tricks.optim import param_roles, schedule_free_parts
from lightning_tricks.optim.mup import at_width

__all__ = ["CoordinateReport", "CoordinateTrial", "coordinate_check"]

DEFAULT_WIDTHS = (64, 128, 256, 512, 1024)
DEFAULT_TOLERANCE = 0.3
_TOKENS = 256  # in a batch of the command: sizes of activations are means over many numbers already
_LONGEST_ROW = 128
_LAYERS = ("embedding", "head")  # roles of parameters whose modules are layers, beside the blocks


class CoordinateTrial(NamedTuple):
    """A model of one width, ready to train.

    Args:
        module: with its weights.
        optimizer: of the module, at its peak learning rate.
        loss: of a batch, by a forward pass of the module.
    """

    module: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[[Any], Tensor]


class Sizes(NamedTuple):
    """The mean absolute value of a layer's output on one batch, at one width.

    Args:
        start: with the initial weights.
        end: after the steps.
        change: of the difference between the two outputs.
    """

    start: float
    end: float
    change: float


@dataclass(frozen=True)
class CoordinateReport:
    """The size of each layer's activations at each width, and whether it stays flat.

    Args:
        widths: of the models, ascending.
        steps: optimizer steps that each model was trained.
        tolerance: the largest slope, up or down, of a layer that counts as flat.
        layers: of each layer the sizes at each width, means over the seeds.
    """

    widths: tuple[int, ...]
    steps: int
    tolerance: float
    layers: Mapping[str, tuple[Sizes, ...]]

    def slope(self, layer: str) -> float:
        """Exponent p of size ~ width^p after the steps, by least squares; 0 for a layer that is silent everywhere."""
        return self._slope([sizes.end for sizes in self.layers[layer]])

    def slope_of_change(self, layer: str) -> float:
        """The same of the change that training made."""
        return self._slope([sizes.change for sizes in self.layers[layer]])

    def _slope(self, sizes: Sequence[float]) -> float:
        if not any(sizes):
            return 0.0
        if not all(sizes) or not all(map(math.isfinite, sizes)):
            return math.inf
        return linear_regression(list(map(math.log, self.widths)), list(map(math.log, sizes))).slope

    @property
    def failed(self) -> list[str]:
        """The layers whose output, or whose change, is not flat."""
        return [
            layer
            for layer in self.layers
            if max(abs(self.slope(layer)), abs(self.slope_of_change(layer))) > self.tolerance
        ]

    def __str__(self) -> str:
        """A table of sizes after the steps, with slopes, and a verdict."""
        heads = [*(f"width {width}" for width in self.widths), "slope", "of change"]
        longest = max(len("layer"), *map(len, self.layers))
        lines = [
            f"mean |output| after {self.steps} steps",
            "layer".ljust(longest) + "".join(h.rjust(12) for h in heads),
        ]
        failed = self.failed
        for layer, sizes in self.layers.items():
            slopes = [f"{slope:+.2f}" for slope in (self.slope(layer), self.slope_of_change(layer))]
            cells = [*(f"{size.end:.4g}" for size in sizes), *slopes]
            mark = "  not flat" if layer in failed else ""
            lines.append(layer.ljust(longest) + "".join(cell.rjust(12) for cell in cells) + mark)
        verdict = f"{len(failed)} of {len(self.layers)} layers are not flat" if failed else "flat"
        return "\n".join([*lines, f"{verdict}: slopes may be {-self.tolerance:g} to {self.tolerance:g}"])


def coordinate_check(
    build: Callable[[int, int], CoordinateTrial],
    batches: Sequence[Any],
    widths: Iterable[int] = DEFAULT_WIDTHS,
    seeds: int = 1,
    tolerance: float = DEFAULT_TOLERANCE,
) -> CoordinateReport:
    """Train a model for a few steps at several widths, and compare the sizes of its activations.

    Under muP the output of every layer, and its change by training, is as large at one width as at any other. Without
    it they grow with the width. The learning rate rises to its peak over the steps, in equal parts: with the peak at
    once, a deep model may leave the range in which the comparison says something.

    Args:
        build: makes the model of a width and a seed.
        batches: one for each step; the first one is measured before and after.
        widths: two or more. A laptop needs minutes for the default.
        seeds: models at each width, over which sizes are averaged.
        tolerance: slope of log(size) over log(width) up to which a layer is flat. Without muP, slopes are 0.6 and more;
            at small widths, and by chance, layers under muP have up to 0.2.

    Raises:
        UsageError: fewer than two widths; no batches; a model without blocks, embeddings and heads.

    Source: mup/coord_check.py and "Coord Check" in README.md of https://github.com/microsoft/mup.
    """
    several = tuple(sorted(set(widths)))
    if len(several) < 2 or several[0] < 1:
        raise UsageError(f"widths={','.join(map(str, several))}: give two or more different widths")
    if not batches or seeds < 1:
        raise UsageError(f"steps={len(batches)}, seeds={seeds}: give at least one of each")
    if not (tolerance > 0 and math.isfinite(tolerance)):
        raise UsageError(f"tolerance={tolerance}: give a number above 0")
    found: dict[str, list[Sizes]] = {}
    for width in several:
        runs = [_measured(build(width, seed), batches) for seed in range(seeds)]
        for layer in runs[0]:
            means = (sum(values) / seeds for values in zip(*(run[layer] for run in runs), strict=True))
            found.setdefault(layer, []).append(Sizes(*means))
    return CoordinateReport(several, len(batches), tolerance, {name: tuple(sizes) for name, sizes in found.items()})


def layers_of(module: nn.Module) -> dict[str, nn.Module]:
    """The modules whose outputs are measured: embeddings, heads, repeated blocks and the children of blocks."""
    modules, blocks = named_submodules(module), repeated_blocks(module)
    roles = {param.name.rpartition(".")[0] for param in param_roles(module) if param.role in _LAYERS}
    norms = {param.name.rpartition(".")[0] for param in param_roles(module) if param.role == "norm"}
    chosen = {
        name: child
        for name, child in modules.items()
        if name in roles or name in blocks or (name.rpartition(".")[0] in blocks and name not in norms)
    }
    if not chosen:
        raise UsageError(f"coordinate-check: {type(module).__name__} has no embedding, head or repeated blocks")
    return chosen


def _measured(trial: CoordinateTrial, batches: Sequence[Any]) -> dict[str, Sizes]:
    """Train, and measure each layer on the first batch before and after."""
    for part in schedule_free_parts(trial.optimizer):
        part.train()  # as the callback ScheduleFree does when training starts
    before = _outputs(trial, batches[0])
    peaks = [group["lr"] for group in trial.optimizer.param_groups]
    for step, batch in enumerate(batches, start=1):
        for group, peak in zip(trial.optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * step / len(batches)
        trial.optimizer.zero_grad()
        trial.loss(batch).backward()
        trial.optimizer.step()
    after = _outputs(trial, batches[0])
    return {
        name: Sizes(*(float(values.abs().mean()) for values in (before[name], after[name], after[name] - before[name])))
        for name in before
    }


@torch.no_grad()
def _outputs(trial: CoordinateTrial, batch: Any) -> dict[str, Tensor]:
    """The output of each layer on a batch, in fp32; of several outputs the first."""
    kept: dict[str, Tensor] = {}

    def hook(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def keep(_: nn.Module, __: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple | list) else output
            kept[name] = first.detach().float()

        return keep

    with ExitStack() as stack:
        for name, layer in layers_of(trial.module).items():
            stack.enter_context(layer.register_forward_hook(hook(name)))  # which its end removes
        trial.loss(batch)
    return kept


def run(
    model: Any,
    datamodule: Any,
    trainer: Any,
    *,
    widths: str = ",".join(map(str, DEFAULT_WIDTHS)),
    steps: int = 10,
    seeds: int = 1,
    tolerance: float = DEFAULT_TOLERANCE,
    json: str | None = None,
) -> None:
    """Train a recipe's decoder for a few steps at several widths, and print how the output of each layer grows.

    Flat with muP; --model.mup null shows the same without it. The heads keep their width, the optimizer rises to its
    peak learning rate. Exits with 1 if some layer is not flat.

    Args:
        model: of the recipe.
        datamodule: of the recipe.
        trainer: not used.
        widths: with commas.
        steps: optimizer steps.
        seeds: models at each width.
        tolerance: largest slope of a flat layer.
        json: file for all figures, - for standard output.

    Raises:
        UsageError: no LanguageModel or no data; a width that its heads do not fit; see `coordinate_check`.
    """
    json_alone = check_json("coordinate-check", json)
    if not isinstance(model, LanguageModel):
        raise UsageError(
            f"coordinate-check: model={type(model).__name__} is no LanguageModel, whose width a recipe gives: call "
            "lightning_tricks.coordinate_check from Python"
        )
    if steps < 1:
        raise UsageError(f"coordinate-check: steps={steps}: give at least 1")
    try:
        shapes = {int(width): _shape(model, int(width)) for width in widths.split(",")}
    except ValueError as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"coordinate-check: widths={widths}: give whole numbers with commas") from None
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None

    def build(width: int, seed: int) -> CoordinateTrial:
        return _trial(model, shapes[width], seed, device or torch.device("cpu"))

    report = coordinate_check(build, _batches(datamodule, steps), shapes, seeds, tolerance)
    with json_alone:
        print(report)
    figures = {name: [sizes._asdict() for sizes in layer] for name, layer in report.layers.items()}
    write_json(json, {"widths": report.widths, "steps": report.steps, "layers": figures})
    sys.exit(1 if report.failed else 0)


def _shape(module: LanguageModel, width: int) -> Any:
    """The recipe's decoder at another width: with more heads, or with wider ones where `base_head_dim` asks for it."""
    config, mup = module.config, module.mup
    widens = mup is not None and mup.base_head_dim not in (None, config.head_dim)
    unit = config.n_heads if widens else config.head_dim
    if width < unit or width % unit:
        raise UsageError(f"coordinate-check: widths: {width} does not fit the recipe's heads: give multiples of {unit}")
    return at_width(config, width, width // unit if widens else unit)


def _trial(module: LanguageModel, config: Any, seed: int, device: torch.device) -> CoordinateTrial:
    """A model of the recipe with another shape, and its optimizer."""
    torch.manual_seed(seed)
    model = LanguageModel(config, mup=module.mup)
    with device:
        model.configure_model()
    optimizer = module.make_optimizer(model)

    def loss(batch: dict[str, Tensor]) -> Tensor:
        here = {name: tensor.to(device) for name, tensor in batch.items()}
        logits = model(here["input_ids"], here.get("document_ids"))
        return F.cross_entropy(logits.flatten(0, 1).float(), here["labels"].flatten())

    return CoordinateTrial(model, optimizer, loss)


def _batches(data: Any, steps: int) -> list[dict[str, Tensor]]:
    """The first rows of the recipe's training data, cut to a length that is enough."""
    if not isinstance(data, TokenDataModule):
        kind = "none" if data is None else type(data).__name__
        raise UsageError(f"coordinate-check: data={kind}: give the recipe TextData or TokenData")
    data.prepare_data()
    data.setup("fit")
    rows, length = data.training_rows(), min(data.seq_len, _LONGEST_ROW)
    count = max(1, _TOKENS // length)
    batches = [[rows[step * count + row] for row in range(count)] for step in range(steps)]
    names = [name for name in batches[0][0] if name != "document_starts"]  # of whole rows
    return [{name: torch.cat([row[name][:, :length] for row in batch]) for name in names} for batch in batches]
