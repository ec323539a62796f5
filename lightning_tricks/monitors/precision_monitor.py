"""Log the effect of a precision plugin on the numbers: the loss scale of fp16, ranges and lost small values of fp8."""

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_map_only

from lightning_tricks._find_modules import clean_name
from lightning_tricks._lightning import Module, Trainer, pl, rank_zero_warn
from lightning_tricks._trainer import enabled_scaler, is_accumulating
from lightning_tricks.metrics.metric_buffer import MetricBuffer
from lightning_tricks.metrics.row import Row
from lightning_tricks.monitors._module_calls import (
    ModuleWatch,
    before_calls,
    measuring_in_forward,
    outermost_compiled,
)
from lightning_tricks.optim.grad_scaler import loss_scale

AMAX = ("input_amax", "weight_amax")
UNDERFLOW = ("input_underflow", "weight_underflow")
RANKS = "ranks"  # on how many the layer was measured


def has_figures(plugin: Any) -> bool:
    """Whether a precision plugin gives `PrecisionMonitor` anything to record."""
    return enabled_scaler(plugin) is not None or hasattr(plugin, "fp8_layers")


def can_run_uncompiled(module: nn.Module) -> bool:
    """Whether `module` may be run once more: not if FSDP2 gathers parts of it, because its hooks count the runs."""
    inner = _uncompiled(module)
    return not any(isinstance(part, FSDPModule) for part in inner.modules() if part is not inner)


def run_uncompiled(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], keep_mode: Collection[nn.Module]
) -> None:
    """Run the forward of a compiled `module` in eager, for the sake of the hooks on what is inside.

    It runs without gradients, in evaluation mode, under the autocast that is on. Random states, buffers and training
    flags are then what they were. Hooks of `module` itself are not called, but parameters that FSDP2 shards are
    gathered and inputs cast as its hook would do; the module's own run, which comes next, finds them gathered. Modules
    in `keep_mode` stay in training mode, for they would compute something else in evaluation.
    """
    inner = _uncompiled(module)
    for part in {id(module): module, id(inner): inner}.values():
        if isinstance(part, FSDPModule):
            part.unshard()
            args, kwargs = _cast_inputs(part, args, kwargs)
    cuda = sorted({tensor.device.index for tensor in inner.parameters() if tensor.device.type == "cuda"})
    with (
        measuring_in_forward(),
        torch.random.fork_rng(cuda),
        torch.compiler.set_stance("force_eager"),  # for what is compiled inside
        _evaluating(inner, keep_mode),
    ):
        inner.forward(*args, **kwargs)


def _cast_inputs(module: FSDPModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The arguments of a call in the dtype to which FSDP2's hook would cast them (`_pre_forward` of its state)."""
    policy = module._get_fsdp_state()._mp_policy
    dtype = policy.param_dtype
    if dtype is None or not policy.cast_forward_inputs:
        return args, kwargs
    return tree_map_only(torch.Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, (args, kwargs))


def _uncompiled(module: nn.Module) -> Any:
    return module._modules.get("_orig_mod") or module


@contextmanager
def _evaluating(module: nn.Module, keep_mode: Collection[nn.Module]) -> Iterator[None]:
    """Evaluation mode inside the `with`; after it, modes and buffers are what they were."""
    kept = {id(part) for part in keep_mode}
    modes = [(part, part.training) for part in module.modules() if id(part) not in kept]
    buffers = [(part, name, held) for part in module.modules() for name, held in part._buffers.items()]
    copies = [(held, held._version, held.clone()) for _, _, held in buffers if held is not None]
    try:
        for part, _ in modes:
            part.training = False  # not `eval()`, which a module may have made its own
        yield
    finally:
        for part, mode in modes:
            part.training = mode
        for part, name, held in buffers:
            part._buffers[name] = held
        for held, version, copy in copies:
            if held._version != version:
                held.copy_(copy)


class Fp8Watch:
    """Let the precision plugin measure weight and input of each fp8 layer once on each log step; record the results.

    A layer that runs in eager is measured when it is called. One inside a compiled module is measured in an eager run
    of that module, just before its own: `run_uncompiled` says what that leaves untouched.

    Args:
        plugin: has `fp8_layers` and `layer_stats(layer, input)`.
        root: the LightningModule; layers have the names of its submodules.
        buffer: to record into.
    """

    def __init__(self, plugin: Any, root: nn.Module, buffer: MetricBuffer) -> None:
        self._plugin, self._buffer = plugin, buffer
        own = {id(module): clean_name(f"{name}.").rstrip(".") for name, module in root.named_modules()}
        self.layers: dict[str, nn.Module] = {own.get(id(x), name): x for name, x in plugin.fp8_layers.items()}
        self._sums = tuple(f"_fp8/{layer}/{part}" for layer in self.layers for part in (*UNDERFLOW, RANKS))
        buffer.at_flush(self._means)
        self._watch = ModuleWatch(
            "PrecisionMonitor does not measure every fp8 layer: {}; if you use torch.compile, compile each block"
        )
        self._in_eager = dict(self.layers)
        self._batch = ExitStack()  # hooks of layers in eager: cheap to set, and nothing compiled is around them
        hidden = 0
        for module in outermost_compiled(root):
            inside = {id(part) for part in module.modules()}
            layers = {name: layer for name, layer in self._in_eager.items() if id(layer) in inside}
            self._in_eager = {name: x for name, x in self._in_eager.items() if name not in layers}
            if module is root or not can_run_uncompiled(module):
                hidden += len(layers)
            elif layers:
                self._watch.hooks.enter_context(before_calls(module, partial(self._measure_inside, module, layers)))
        if hidden:
            reason = "fp8 layers are inside a model that is compiled as a whole"
            self._watch.warn(f"{hidden} of {len(self.layers)} {reason}")

    def start_batch(self, trainer: Any) -> None:
        """Measure in the last micro-batch of a log step, each layer when it runs for the first time."""
        self._watch.start_batch(trainer, self._buffer)
        if self._watch.is_open:
            self._hook(self._in_eager, self._batch)

    def end_batch(self, device: torch.device) -> None:
        """Record. Every rank gives the same number of values, whichever layers ran on it: a collective joins them."""
        self._batch.close()
        found = self._watch.end_batch(self.layers, "none ran where it can be seen")
        if found is None:
            return
        amax = {f"fp8/{layer}/{name}": stats[name] for layer, stats in found.items() for name in AMAX}
        self._buffer.record_largest([f"fp8/{layer}/{name}" for layer in self.layers for name in AMAX], amax)
        zero, one = torch.zeros((), device=device), torch.ones((), device=device)
        parts = [{**found[layer], RANKS: one} if layer in found else {} for layer in self.layers]
        values = [part.get(name, zero).to(device, torch.float32) for part in parts for name in (*UNDERFLOW, RANKS)]
        self._buffer.record_all(self._sums, torch.stack(values), "sum")

    def stop(self) -> None:
        """Leave the model as it was."""
        self._batch.close()
        self._watch.stop()

    def _means(self, rows: list[Row]) -> dict[str, float]:
        """Mean underflows over the ranks that have them, and the largest of any input."""
        values = rows[-1].values
        means = {
            f"fp8/{layer}/{name}": values[f"_fp8/{layer}/{name}"] / number
            for layer in self.layers
            for name in UNDERFLOW
            if (number := values.get(f"_fp8/{layer}/{RANKS}", 0.0))
        }
        of_inputs = [share for name, share in means.items() if name.endswith(UNDERFLOW[0])]
        return means | ({"precision/fp8_underflow_max": max(of_inputs)} if of_inputs else {})

    def _hook(self, layers: dict[str, nn.Module], scope: ExitStack) -> None:
        for name, layer in layers.items():
            scope.enter_context(self._watch.measuring(name, layer, before_calls, partial(self._stats, layer)))

    def _stats(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Tensor] | None:
        given = args[0] if args else kwargs["input"]
        return self._plugin.layer_stats(layer, given) if given.numel() else None  # an expert may have no tokens

    def _measure_inside(
        self, module: nn.Module, layers: dict[str, nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if not self._watch.is_open or any(name in self._watch.found for name in layers):
            return
        for name, layer in layers.items():
            if layer in (module, module._modules.get("_orig_mod")):  # the layer itself is compiled
                with measuring_in_forward():
                    if (stats := self._stats(layer, args, kwargs)) is not None:
                        self._watch.found[name] = stats
                return
        with ExitStack() as hooks:
            self._hook(layers, hooks)
            try:
                run_uncompiled(module, args, kwargs, keep_mode=layers.values())
            except Exception as error:  # a watcher must not end a run that would train
                line = f"{type(error).__name__}: {error}".partition("\n")[0]
                self._watch.warn(f"{type(module).__name__} does not run without its graph ({line})")


class PrecisionMonitor(pl.Callback):
    """Record how a 16-bit or 8-bit format copes with the run's numbers. Never changes training.

    With loss scaling, of every optimizer step:

    - `precision/loss_scale`: the scale that the step used. Two steps within one batch: the second's.
    - `precision/skipped_steps`: how many steps have been skipped for an overflow since the run began, this one
      included. It is the plugin's own `skipped_steps`; a plugin without one has skipped a step where its scale fell.

    In fp8, of each log step's last micro-batch:

    - `precision/fp8_share`: share of the multiply-adds of all linear layers that is in fp8.
    - `fp8/<layer>/input_amax`, `/weight_amax`: largest absolute value, over ranks as well.
    - `fp8/<layer>/input_underflow`, `/weight_underflow`: share of the nonzero values that become zero in fp8 (0 to 1),
      the mean over ranks.
    - `precision/fp8_underflow_max`: the largest `input_underflow` of any layer.

    It reads attributes of the Trainer's precision plugin: `scaler`, as Lightning's own plugin has it, or `fp8_layers`,
    `converted_share` and `layer_stats`. For any other plugin, one warning is printed and nothing is recorded.

    Layers inside modules that are compiled one by one are measured in an eager run of these modules just before their
    own, without gradients and in evaluation mode, so that the graph, random numbers and buffers stay as they are:
    one more forward pass of the blocks on log steps. Dropout before a layer is off there.

    Args:
        per_layer: measure the layers. False: of the fp8 metrics, only `precision/fp8_share` is recorded.

    Source: https://github.com/pytorch/pytorch/blob/main/torch/amp/grad_scaler.py (when a step is skipped and how the
        scale moves); Micikevicius et al. 2022, https://arxiv.org/abs/2209.05433 (what fp8 holds).
    """

    def __init__(self, per_layer: bool = True) -> None:
        self.per_layer = per_layer
        self._watch: Fp8Watch | None = None
        self._used: Tensor | None = None  # the scale of a step whose outcome is not known yet
        self._counted = 0
        self._skipped: Tensor | None = None

    def setup(self, trainer: Trainer, pl_module: Module, stage: str) -> None:
        """Find the buffer, and start counting; a checkpoint is loaded later."""
        if stage != "fit":  # a checkpoint that is saved after a validation still has the count
            return
        self._buffer = MetricBuffer.of(trainer)
        self._counted, self._skipped, self._used = 0, None, None

    def on_fit_start(self, trainer: Trainer, pl_module: Module) -> None:
        """Find the fp8 layers: the plugin has converted them by now."""
        plugin: Any = trainer.precision_plugin
        if not has_figures(plugin):
            name = type(plugin).__name__
            rank_zero_warn(f"PrecisionMonitor records nothing: {name} neither scales the loss nor multiplies in fp8")
        self._share = float(plugin.converted_share) if hasattr(plugin, "fp8_layers") else None

    def on_train_batch_start(self, trainer: Trainer, pl_module: Module, batch: Any, batch_idx: int) -> None:
        """Measure in the last micro-batch of a log step."""
        if self._watch is None and self._share is not None and self.per_layer:
            # not before the first batch: until then any hook may compile modules
            self._watch = Fp8Watch(trainer.precision_plugin, pl_module, self._buffer)
        if self._watch is not None:
            self._watch.start_batch(trainer)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Module, optimizer: torch.optim.Optimizer) -> None:
        """Keep the scale, before the scaler writes the next one into its place."""
        scaler = enabled_scaler(trainer.precision_plugin)
        scale = loss_scale(scaler) if scaler is not None else None
        if scale is not None:
            self._settle(trainer.precision_plugin)
            self._used = scale.clone()
            self._buffer.record("precision/loss_scale", self._used)

    def _settle(self, plugin: Any) -> None:
        """Count the last step if it was skipped; on the device, where nobody waits for the answer."""
        if self._used is None:
            return
        used, self._used = self._used, None
        skipped = getattr(plugin, "skipped_steps", None)
        if skipped is None:
            if self._skipped is None:
                self._skipped = torch.full((), self._counted, dtype=torch.int64, device=used.device)
            scale = loss_scale(plugin.scaler)
            assert scale is not None  # the step has used one
            skipped = self._skipped = self._skipped + (scale < used)
        self._buffer.record("precision/skipped_steps", skipped)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Record the skipped steps, and on log steps the fp8 metrics."""
        self._settle(trainer.precision_plugin)
        if self._share is not None and not is_accumulating(trainer) and self._buffer.is_log_step():
            self._buffer.record("precision/fp8_share", self._share)
        if self._watch is not None:
            self._watch.end_batch(pl_module.device)

    def state_dict(self) -> dict[str, Any]:
        """The number of skipped steps, if this monitor counts them and not the plugin."""
        counted = self._counted if self._skipped is None else int(self._skipped)
        return {"skipped_steps": counted} if counted else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on counting."""
        self._counted = state_dict["skipped_steps"]

    def on_fit_end(self, trainer: Trainer, pl_module: Module) -> None:
        """Leave the model as it was."""
        if self._watch is not None:
            self._watch.stop()
            self._watch = None

    def on_exception(self, trainer: Trainer, pl_module: Module, exception: BaseException) -> None:
        """Leave the model as it was."""
        self.on_fit_end(trainer, pl_module)
