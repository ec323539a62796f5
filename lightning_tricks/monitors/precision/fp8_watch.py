"""Measure the weight and the input of each fp8 layer of a model, also of layers inside compiled modules."""

from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_tricks._find_modules import clean_name
from lightning_tricks.metrics.metric_buffer import MetricBuffer
from lightning_tricks.metrics.row import Row
from lightning_tricks.monitors._module_calls import ModuleWatch, before_calls, outermost_compiled
from lightning_tricks.monitors.precision.uncompiled import can_run_uncompiled, run_uncompiled

AMAX = ("input_amax", "weight_amax")
UNDERFLOW = ("input_underflow", "weight_underflow")
RANKS = "ranks"  # on how many the layer was measured


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
                with torch.no_grad():
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
