"""fp8 matrix products over bf16: the large layers, converted in place before the model is compiled and sharded.

First the choice of the layers, with a reason for each that stays, then the plugin. `float8_linear` has the products
with one scale for each tensor, `float8_kept` what stays between passes, `float8_torchao` what torchao computes.
"""

import logging
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from lightning_tricks._core.errors import PIP_EXTRA, UsageError, check_choice
from lightning_tricks._core.find_modules import check_pattern, clean_name
from lightning_tricks._trainer.lightning import pl, rank_zero_info
from lightning_tricks._trainer.objects import trainer_of
from lightning_tricks._trainer.refusals import PRECISION_PLUGIN
from lightning_tricks._trainer.run_facts import weights_layout
from lightning_tricks.logs.table import lines_of
from lightning_tricks.optim.param_roles import head_weights
from lightning_tricks.parallel.tensor import TENSOR_AXIS
from lightning_tricks.precision.bf16_mixed import BF16Mixed
from lightning_tricks.precision.bf16_true import BF16True
from lightning_tricks.precision.float8_kept import WINDOW, AmaxHistory, KeptWeights
from lightning_tricks.precision.float8_linear import CheckedLinear, LayerSettings, convert, pays, revert, template

__all__ = ["Float8"]

Base = Literal["bf16-mixed", "bf16-true"]
_TORCHAO = "lightning_tricks.precision.float8_torchao"
Recipe = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8"]
Scaling = Literal["dynamic", "delayed"]

# every dimension of a product, tokens included, must be a multiple of this: 16 bytes for cuBLAS, a block of 32 for MX
MULTIPLE: dict[str, int] = {"tensorwise": 16, "rowwise": 16, "rowwise_with_gw_hp": 16, "mxfp8": 32}


def named_linears(module: nn.Module) -> dict[str, nn.Linear]:
    """Every linear layer at or below `module` by its name without wrappers' prefixes, shared ones once."""
    found = ((clean_name(name + ".").rstrip("."), part) for name, part in module.named_modules())
    return {name: part for name, part in found if isinstance(part, nn.Linear)}


def choose_layers(
    module: nn.Module,
    recipe: str,
    exclude: Sequence[str] = (),
    pays: Callable[[nn.Module, str], bool] | None = None,
) -> dict[str, str]:
    """The first reason that keeps a linear layer from being converted, by its name; empty if it is converted.

    Args:
        module: of the layers.
        recipe: of Float8.
        exclude: patterns of names.
        pays: of (layer, name), whether fp8 is faster; torchao's filter. None: all layers may be converted.
    """
    heads = {id(weight) for weight in head_weights(module)}  # their error goes straight into the loss
    linears, multiple = named_linears(module), MULTIPLE[recipe]

    def reason_of(name: str, layer: nn.Linear) -> str:
        weight = layer._parameters.get("weight")  # None if a hook computes it
        if id(weight) in heads:
            return "output head"
        if type(layer) is not nn.Linear or "forward" in vars(layer) or weight is None:
            return "has a forward or a weight of its own"
        if excludes(exclude, name):
            return "exclude"
        if layer.in_features % multiple or layer.out_features % multiple:
            return f"dimensions no multiples of {multiple}"
        return "" if pays is None or pays(layer, name) else "too small to pay"

    reasons = {name: reason_of(name, layer) for name, layer in linears.items()}
    chosen = {layer for name, layer in linears.items() if not reasons[name]}
    kept = {id(param) for part in module.modules() if part not in chosen for param in part._parameters.values()}
    for name, layer in linears.items():
        if not reasons[name] and id(layer.weight) in kept:
            reasons[name] = "weight shared with a layer that stays"
    return reasons


def excludes(exclude: Sequence[str], name: str) -> bool:
    """Whether one of the patterns is found in a layer's name."""
    return any(re.search(pattern, name) for pattern in exclude)


def refuse_tensor_parallel(module: nn.Module, layers: Sequence[nn.Linear]) -> None:
    """Refuse layers that a module has divided itself, and that multiply with a shard: a scale would be the shard's.

    Weights of FSDP2 are allowed, as it gathers them before the product. Their layer lies in a module that FSDP2 wraps,
    and they are split over one mesh dimension only.
    """
    gathered = {id(part) for root in module.modules() if isinstance(root, FSDPModule) for part in root.modules()}
    for name, layer in named_linears(module).items():
        weight = layer._parameters.get("weight")
        if layer not in layers or not isinstance(weight, DTensor):
            continue
        splits = sum(not placement.is_replicate() for placement in weight.placements)
        if id(layer) not in gathered or splits > 1:
            raise UsageError(
                f"plugins: Float8 does not work with tensor parallelism, which splits {name} ({weight.placements}): "
                "leave it to FSDP2Strategy's mesh.tensor, or use BF16Mixed"
            )


def parts_of_tensor_ranks(layers: Mapping[str, nn.Linear], multiple: int) -> list[nn.Linear]:
    """The layers of which a tensor rank of FSDP2Strategy has a part; refuse one whose size fp8 cannot multiply."""
    found = []
    for name, layer in layers.items():
        weight: Any = layer.weight
        names = (isinstance(weight, DTensor) and weight.device_mesh.mesh_dim_names) or ()
        if TENSOR_AXIS not in names:
            continue
        found.append(layer)
        axis = names.index(TENSOR_AXIS)
        ranks, placement = weight.device_mesh.size(axis), weight.placements[axis]
        size = weight.shape[placement.dim] // ranks
        if size % multiple:
            field = ("out_features", "in_features")[placement.dim]
            raise UsageError(
                f"plugins: Float8: mesh.tensor={ranks} leaves {size} of the {field} of {name} to a rank, no multiple "
                f"of {multiple}, which fp8 needs: exclude the layer, or take fewer tensor ranks"
            )
    return found


def layers_table(layers: dict[str, tuple[nn.Linear, str]]) -> str:
    """A plain text table of linear layers: name, number, shape (outputs x inputs), format of the products.

    One row stands for all layers that differ only in the numbers in their names.
    """
    counts: Counter[tuple[str, str, str]] = Counter()
    for name, (layer, note) in layers.items():
        pattern = ".".join("*" if part.isdigit() else part for part in name.split("."))
        counts[pattern, f"{layer.out_features} x {layer.in_features}", note] += 1
    rows = [("linear layers", "count", "shape", "products")]
    rows += [(pattern, str(count), shape, note) for (pattern, shape, note), count in counts.items()]
    return "\n".join(lines_of(rows, left=(0, 3)))


class Float8(pl.plugins.Precision):
    """Multiply the large linear layers in fp8; everything else as `base` does.

    The layers are converted in place. If the module's `configure_model` calls `convert_before_sharding`, as
    LanguageModel's does, this happens before the model is compiled and sharded; otherwise when training starts. Names,
    weights and checkpoints are those of the model without fp8: each opens in the other. A table at the start says which
    layers are converted, and why the others are not. The module stays converted after the run.

    Args:
        recipe: Scaling of tensors to fp8. `tensorwise`: one scale for a tensor, the fastest; under FSDP2 weights are
            gathered in fp8 too. `rowwise`: one scale for each row, for tensors with outliers. `rowwise_with_gw_hp`: as
            `rowwise`, with the gradient of the weight in bf16, the most accurate. `mxfp8`: one scale for 32 elements,
            needs Blackwell.
        scaling: `dynamic`: each tensor's scale is its own. `delayed`: inputs and gradients have scales from the last
            16 optimizer steps, so that the kernel that computes them casts them too; the first 16 steps are dynamic.
            Larger numbers than before saturate. Weights keep their own. For `tensorwise`.
        keep_fp8_weights: Cast weights once an optimizer step, and keep them over its micro-batches, in 2 bytes a
            parameter. For `tensorwise`, with whole weights.
        base: `bf16-mixed` or `bf16-true`: the format of the weights and of everything that is not fp8.
        exclude: Regular expressions, searched in the names of layers, that keep layers besides the head in bf16.
        convert_small: Convert also the layers that are too small to be faster in fp8, by torchao's filter.
        emulate: Multiply the rounded numbers in fp32, on any device: the values of fp8, slowly.
        evaluate_in_bf16: Multiply in bf16 while a layer is in eval mode. Weights are then gathered in bf16.
        allow_eager: Train on CUDA without `torch.compile`; fp8 is then slower than bf16.

    Attributes:
        fp8_layers: The converted layers by name.
        converted_share: Share of the multiply-adds of all linear layers that is in fp8, from 0 to 1.
        fsdp2_policy: The base's.
        peak_dtype: `fp8` for MFU; None if fp8 is emulated.

    Raises:
        UsageError: torchao is missing or too old, which all but `tensorwise` need; a GPU without fp8, or a CPU, and no
            `emulate`; nothing to convert; `exclude` matches nothing; tensor parallelism by other than FSDP2Strategy, or
            into parts that are no multiple of 16; a strategy with a precision of its own; `scaling: delayed` with
            tensor ranks or stages; `keep_fp8_weights` with shards.

    Source: Micikevicius et al. 2022, https://arxiv.org/abs/2209.05433; torchao,
        https://github.com/pytorch/ao/blob/main/docs/source/workflows/training.md.
    """

    def __init__(
        self,
        recipe: Recipe = "tensorwise",
        base: Base = "bf16-mixed",
        exclude: Sequence[str] = (),
        convert_small: bool = False,
        emulate: bool = False,
        evaluate_in_bf16: bool = False,
        allow_eager: bool = False,
        scaling: Scaling = "dynamic",
        keep_fp8_weights: bool = False,
    ) -> None:
        for option, value, known in (("recipe", recipe, Recipe), ("base", base, Base), ("scaling", scaling, Scaling)):
            check_choice(f"Float8.{option}", value, known)
        for option, chosen in ((f"scaling={scaling}", scaling == "delayed"), ("keep_fp8_weights", keep_fp8_weights)):
            if chosen and recipe != "tensorwise":
                raise UsageError(f"Float8.{option} is for recipe=tensorwise, not {recipe}: change one of the two")
        if isinstance(exclude, str):
            raise UsageError(f"Float8.exclude={exclude!r}: give a list of patterns")
        self.exclude = tuple(exclude)
        for pattern in self.exclude:
            check_pattern(pattern, "Float8.exclude")
        self.recipe, self.convert_small, self.emulate = recipe, convert_small, emulate
        self.scaling, self.keep_fp8_weights = scaling, keep_fp8_weights
        self._base: Any = BF16Mixed() if base == "bf16-mixed" else BF16True()
        self.precision = self._base.precision
        self.peak_dtype = None if emulate else "fp8"
        self.fp8_layers: dict[str, nn.Linear] = {}
        self.converted_share = 0.0
        self._template = template() if recipe == "tensorwise" else _load_torchao(recipe).template(recipe, emulate)
        self._compiles = not (emulate or allow_eager)
        self._settings = LayerSettings(recipe, MULTIPLE[recipe], evaluate_in_bf16, self._compiles, emulate)
        self._gather_in_fp8 = recipe == "tensorwise" and not evaluate_in_bf16 and not _lacks_torchao(recipe)
        self._history: AmaxHistory | None = None
        self._kept: KeptWeights | None = None
        self._scales: Any = None  # a Scales, if FSDP2 gathers weights in fp8
        self._skipped: dict[nn.Module, str] = {}  # layers that stay, with the reason

    def __repr__(self) -> str:
        return f"{type(self).__name__}(recipe={self.recipe!r}, base={self._base!r})"

    @property
    def fsdp2_policy(self) -> MixedPrecisionPolicy:
        """The base's: weights that are not gathered in fp8 are gathered in bf16, gradients reduced in fp32."""
        return self._base.fsdp2_policy

    def tensor_init_context(self) -> AbstractContextManager[Any]:
        """The base's."""
        return self._base.tensor_init_context()

    def convert_before_sharding(self, module: nn.Module, sharded: bool = True) -> None:
        """Convert the layers of `module`; a `configure_model` calls it before it compiles and shards. Idempotent.

        Only weights of layers that are converted before sharding can be gathered in fp8. Works on the meta device too.

        Args:
            module: with the layers.
            sharded: False: no sharding follows.
        """
        converted = self._convert(module)
        if self._gather_in_fp8 and sharded:
            _load_torchao(self.recipe).gather_in_fp8(converted, self.emulate)

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Convert the layers that are not converted yet; show the table; then do what the base does."""
        trainer = trainer_of(module)
        PRECISION_PLUGIN.check(getattr(trainer, "strategy", None), "plugins: Float8")
        if trainer is not None:
            self._refuse_device(trainer.strategy.root_device)
            self._refuse_strategy(trainer.strategy, trainer)
        self._convert(module)
        linears = named_linears(module)
        # without those of another module, in an earlier fit
        self._skipped = {layer: reason for layer, reason in self._skipped.items() if layer in linears.values()}
        for pattern in self.exclude if linears else ():
            if not any(re.search(pattern, name) for name in linears):
                raise UsageError(
                    f"Float8.exclude: pattern {pattern!r} matches no linear layer: names are such as {[*linears][-1]}"
                )
        self.fp8_layers = {name: layer for name, layer in linears.items() if self._is_mine(layer)}
        if not self.fp8_layers:
            raise self._nothing_to_convert([self._skipped.get(layer, "") for layer in linears.values()])
        divided = parts_of_tensor_ranks(self.fp8_layers, MULTIPLE[self.recipe])
        if divided and self.recipe == "tensorwise":  # torchao's layers know tensors that several ranks have
            torchao = _load_torchao(self.recipe)
            theirs = torchao.template(self.recipe, self.emulate)
            for layer in divided:
                name: Any = layer.fp8_name
                revert(layer)
                convert(layer, name, self._settings, theirs)
        gathered = []
        if _TORCHAO in sys.modules:
            torchao = sys.modules[_TORCHAO]
            torchao.unwrap_unsharded(linears.values())
            gathered = [layer for layer in self.fp8_layers.values() if torchao.gathers_in_fp8(layer)]
        module = self._base.convert_module(module)
        self._scales = torchao.Scales(gathered) if gathered else None
        # an evaluation after a fit leaves what the fit recorded to the next checkpoint
        if self.scaling == "delayed" and (trainer is None or trainer.state.fn == "fit"):
            first = next(module.parameters())
            join = [partial(trainer.strategy.reduce, reduce_op="max")] if trainer is not None else []
            device = first.device if trainer is None else trainer.strategy.root_device
            self._history = AmaxHistory(self.fp8_layers, device, *join)
        if self.keep_fp8_weights:
            self._kept = KeptWeights(module, [*self.fp8_layers.values()], self.emulate, self._compiles)
        sizes = {name: layer.out_features * layer.in_features for name, layer in linears.items()}
        self.converted_share = sum(sizes[name] for name in self.fp8_layers) / sum(sizes.values())
        rank_zero_info(*self._summary(linears, len(gathered)).split("\n"))
        return module

    def connect(self, model: Any, optimizers: list[Any], lr_schedulers: list[Any]) -> tuple[Any, list[Any], list[Any]]:
        """As the base; each optimizer step makes the scales of weights stale, and ends a step of the history."""
        stale = [part.forget for part in (self._scales, self._kept) if part is not None]
        for hook in [*stale, *([self._history.end_step] if self._history is not None else [])]:
            for optimizer in optimizers:
                optimizer.register_step_post_hook(hook)
        return self._base.connect(model, optimizers, lr_schedulers)

    def state_dict(self) -> dict[str, Any]:
        """The base's, and the history of delayed scales; other scales are computed from the tensors."""
        own = {} if self._history is None else {"amax_history": self._history.state_dict()}
        return {**self._base.state_dict(), **own}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the base's state, and with the history, if the other run had one."""
        self._base.load_state_dict(state_dict)
        if self._history is not None and "amax_history" in state_dict:
            self._history.load_state_dict(state_dict["amax_history"])

    def forward_context(self) -> AbstractContextManager[None]:
        """The base's: autocast for everything that is not fp8."""
        return self._base.forward_context()

    @contextmanager
    def train_step_context(self) -> Iterator[None]:
        """As the base, after computing the scales of all weights that are gathered in fp8, and casting kept weights."""
        if self._scales is not None:
            self._scales.compute()
        if self._kept is not None:
            self._kept.refresh()
        with self.forward_context():
            yield

    @contextmanager
    def val_step_context(self) -> Iterator[None]:
        """As the base, with scales of the current weights: these may be averages in place of the trained ones."""
        with self._scales.computed_anew() if self._scales is not None else nullcontext(), self.forward_context():
            yield

    test_step_context = predict_step_context = val_step_context

    def post_backward(self, tensor: Any, module: Any) -> Any:
        """As the base, after taking the largest magnitudes for the history."""
        if self._history is not None:
            self._history.record()
        return super().post_backward(tensor, module)

    def check_run(self, trainer: Any, datamodule: Any, command: str) -> None:
        """Refuse a strategy that the options exclude, before any process is started."""
        self._refuse_strategy(trainer.strategy, trainer)

    def teardown(self) -> None:
        """As the base; no scale and no copy of a weight outlives the run."""
        for part in (self._scales, self._kept, self._history):
            if part is not None:
                part.forget()
        self._kept = None
        self._base.teardown()

    def _is_mine(self, layer: nn.Module) -> bool:
        return getattr(layer, "fp8", None) is self._settings

    def _convert(self, module: nn.Module) -> list[nn.Linear]:
        """Convert the chosen layers that are not converted yet, and return them."""
        for name, layer in named_linears(module).items():
            # another plugin converted it, or its longer name in the whole module is excluded
            stays = self._is_mine(layer) and not excludes(self.exclude, name)
            if isinstance(layer, CheckedLinear) and not stays:
                revert(layer)
        large = None if self.convert_small else pays(self.recipe)
        reasons = choose_layers(module, self.recipe, self.exclude, large)
        converted = []
        for name, layer in named_linears(module).items():
            if self._is_mine(layer):
                continue
            if reasons[name]:
                self._skipped.setdefault(layer, reasons[name])
            elif layer not in self._skipped:
                convert(layer, name, self._settings, self._template)
                converted.append(layer)
        refuse_tensor_parallel(module, converted)
        return converted

    def _refuse_strategy(self, strategy: Any, trainer: Any) -> None:
        layout, where = weights_layout(strategy), type(strategy).__name__
        if self.keep_fp8_weights and layout != "whole":
            raise UsageError(
                f"plugins: Float8.keep_fp8_weights needs whole weights, of which a rank of {where} has parts: "
                "leave it out, or train on one device or with ddp"
            )
        dims = strategy.dims_of(trainer.num_nodes * trainer.num_devices) if layout == "shards" else None
        if self.scaling == "delayed" and dims is not None and max(dims.tensor, dims.pipeline) > 1:
            raise UsageError(
                f"plugins: Float8.scaling=delayed needs the same layers on all ranks, not mesh.tensor={dims.tensor}, "
                f"mesh.pipeline={dims.pipeline}: set scaling: dynamic, or leave both at 1"
            )

    def _refuse_device(self, device: torch.device) -> None:
        if self.emulate:
            return
        if device.type != "cuda":
            raise UsageError(
                f"plugins: Float8 multiplies on CUDA, not on {device.type}: set emulate: true for the same values"
            )
        needed = (10, 0) if self.recipe == "mxfp8" else (8, 9)
        found = torch.cuda.get_device_capability(device)
        if found < needed:
            raise UsageError(
                f"plugins: Float8(recipe={self.recipe!r}) needs compute capability {needed[0]}.{needed[1]} or later, "
                f"{torch.cuda.get_device_name(device)} has {found[0]}.{found[1]}: use BF16Mixed"
            )

    def _nothing_to_convert(self, reasons: Sequence[str]) -> UsageError:
        """The number of layers for each reason, and a remedy."""
        if not reasons:
            return UsageError("plugins: Float8 found no nn.Linear in the module: use BF16Mixed instead")
        counts = ", ".join(f"{count} {reason}" for reason, count in Counter(reasons).most_common())
        small = "too small to pay" in reasons
        remedy = "set convert_small: true to convert them all the same" if small else "use BF16Mixed"
        return UsageError(
            f"plugins: Float8(recipe={self.recipe!r}) converts none of {len(reasons)} layers ({counts}): {remedy}"
        )

    def _summary(self, linears: dict[str, nn.Linear], gathered: int) -> str:
        sharded = sum(isinstance(layer.weight, DTensor) for layer in self.fp8_layers.values())
        facts = [self.recipe, str(self._base), "emulated" if self.emulate else "on the device"]
        facts += [f"scales of the last {WINDOW} steps"] * (self.scaling == "delayed")
        facts += ["weights in fp8 kept over a step"] * self.keep_fp8_weights
        if sharded:
            missing = " as torchao is missing" if self.recipe == "tensorwise" and _lacks_torchao(self.recipe) else ""
            facts.append(f"{gathered} of {sharded} weights gathered in fp8, the others in bf16{missing}")
        notes = {
            name: (layer, "fp8" if self._is_mine(layer) else f"not fp8: {self._skipped[layer]}")
            for name, layer in linears.items()
        }
        share = f"{self.converted_share:.1%} of the linear layers' multiply-adds in fp8"
        return f"Float8: {share} ({'; '.join(facts)})\n{layers_table(notes)}"


def _lacks_torchao(recipe: str) -> str:
    """Why torchao is of no use, for the user; empty if it is there and new enough."""
    needed = "0.18" if recipe == "mxfp8" else "0.17"
    try:
        found = version("torchao")
    except PackageNotFoundError:
        return f"plugins: Float8(recipe={recipe!r}) needs torchao: {PIP_EXTRA.format('fp8')}"
    if _numbers(found) >= _numbers(needed):
        return ""
    return f"plugins: Float8(recipe={recipe!r}) needs torchao {needed} or later, found {found}: pip install -U torchao"


def _load_torchao(recipe: str) -> Any:
    """The module `float8_torchao`."""
    if lacks := _lacks_torchao(recipe):
        raise UsageError(lacks)
    if _TORCHAO in sys.modules:
        return sys.modules[_TORCHAO]
    # torchao warns about its own kernels that this machine cannot load; its float8 layers use torch's
    levels = {logger: logger.level for logger in map(logging.getLogger, ("torchao", "torch.utils._pytree"))}
    for logger in levels:
        logger.setLevel(logging.ERROR)
    try:
        return import_module(_TORCHAO)
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])
