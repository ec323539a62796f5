"""Look at what goes into each fp8 layer of a model, also into those inside compiled modules."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_tricks._find_modules import clean_name
from lightning_tricks._lightning import pl_import
from lightning_tricks.monitors._module_calls import Undo, before_calls, outermost_compiled
from lightning_tricks.monitors.precision.uncompiled import can_run_uncompiled, run_uncompiled

rank_zero_warn = pl_import("utilities.rank_zero").rank_zero_warn
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Fp8Watch:
    """Have the precision plugin measure each fp8 layer's weight and input, once between `open` and `close`.

    A layer that runs in eager is seen when it is called. One inside a compiled module is seen in an eager run of that
    module, just before its own: `run_uncompiled` says what that leaves untouched.

    Args:
        plugin: with `fp8_layers` and `layer_stats(layer, input)`.
        root: the LightningModule; layers are named as its submodules are.
    """

    def __init__(self, plugin: Any, root: nn.Module) -> None:
        self._plugin = plugin
        own = {id(module): clean_name(f"{name}.").rstrip(".") for name, module in root.named_modules()}
        self.layers: dict[str, nn.Module] = {own.get(id(x), name): x for name, x in plugin.fp8_layers.items()}
        self.found: dict[str, dict[str, Tensor]] = {}
        self._open = self._warned = False
        self._in_eager = dict(self.layers)
        self._hooks: list[Undo] = []
        self._undo: list[Undo] = []
        hidden = 0
        for module in outermost_compiled(root):
            inside = {id(part) for part in module.modules()}
            layers = {name: layer for name, layer in self._in_eager.items() if id(layer) in inside}
            self._in_eager = {name: x for name, x in self._in_eager.items() if name not in layers}
            if module is root or not can_run_uncompiled(module):
                hidden += len(layers)
            elif layers:
                # watched all the time: what comes and goes would make torch.compile compile again what is around it
                self._undo.append(before_calls(module, partial(self._see_inside, module, layers)))
        if hidden:
            self.warn(f"{hidden} of {len(self.layers)} fp8 layers are inside a model that is compiled as a whole")

    def warn(self, reason: str) -> None:
        """Say once what is not measured."""
        if not self._warned:
            self._warned = True
            rank_zero_warn(
                f"PrecisionMonitor does not measure every fp8 layer: {reason}; if you use torch.compile, compile each "
                "block"
            )

    def open(self) -> None:
        """Measure from here on, each layer when it runs for the first time."""
        self._open, self.found = True, {}
        self._hooks = [before_calls(layer, partial(self._see, name, layer)) for name, layer in self._in_eager.items()]

    def close(self) -> None:
        """Measure no longer. What `found` holds, by layer, stays until the next `open`."""
        self._open = False
        while self._hooks:
            self._hooks.pop()()

    def stop(self) -> None:
        """Leave the model as it was."""
        self.close()
        while self._undo:
            self._undo.pop()()

    @torch.no_grad()
    def _see(self, name: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = args[0] if args else kwargs["input"]
        if name not in self.found and given.numel():  # an expert may have no tokens
            self.found[name] = self._plugin.layer_stats(layer, given)

    def _see_inside(
        self, module: nn.Module, layers: dict[str, nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if not self._open or any(name in self.found for name in layers):
            return
        itself = next(
            (name for name, layer in layers.items() if layer in (module, module._modules.get("_orig_mod"))), ""
        )
        if itself:
            self._see(itself, layers[itself], args, kwargs)
            return
        hooks = [before_calls(layer, partial(self._see, name, layer)) for name, layer in layers.items()]
        try:
            run_uncompiled(module, args, kwargs, keep_mode=layers.values())
        except Exception as error:  # a watcher must not end a run that would train
            self.warn(f"{type(module).__name__} does not run without its graph ({_one_line(error)})")
        finally:
            for undo in hooks:
                undo()


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]
