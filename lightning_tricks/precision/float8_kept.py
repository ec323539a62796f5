"""What tensorwise layers keep between passes: the largest magnitudes of earlier steps, and weights in fp8."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_tricks.precision.float8_linear import E4M3, E5M2, Float8Linear, KeptWeight, cast_weights, scale_for

WINDOW = 16  # optimizer steps


class AmaxHistory:
    """Largest magnitudes of inputs and gradients in the last `WINDOW` steps, from which layers have their scales.

    Until there are so many steps the layers scale by the tensors themselves: gradients may be zero in the first ones,
    and grow fast. After that they are compiled once more. Scales change with an optimizer step only, so that all
    micro-batches of a step have the same ones, on all ranks. Nothing waits for the device.

    Args:
        layers: by name, the same on every rank.
        device: of the products.
        join: the largest of a tensor's values over the ranks that have other tokens.
    """

    def __init__(
        self, layers: dict[str, nn.Linear], device: torch.device, join: Callable[[Tensor], Tensor] = lambda own: own
    ) -> None:
        self._names, self._layers, self._join = list(layers), [*layers.values()], join
        self._steps, self._recorded = 0, False
        self._rows = torch.zeros(WINDOW, len(layers), 2, device=device)
        self._current = torch.zeros_like(self._rows[0])
        self._unused = torch.zeros(2, device=device)
        self._scales = torch.ones(len(layers), 4, device=device)  # of which two pad: compilers want 16 bytes
        for layer in self._layers:
            layer.amaxes = torch.zeros(2, device=device, requires_grad=True)

    def record(self) -> None:
        """Take the magnitudes that the backward pass has left. A step that was not finite leaves none."""
        found: list[Any] = [layer.amaxes.grad for layer in self._layers]
        if all(grad is None for grad in found):
            return
        amaxes = torch.stack([self._unused if grad is None else grad for grad in found])
        self._current = torch.maximum(self._current, amaxes.nan_to_num(nan=0.0, posinf=0.0))
        self._recorded = True
        for layer in self._layers:
            layer.amaxes.grad = None

    def end_step(self, *_: Any) -> None:
        """After an optimizer step: the window goes on, over the magnitudes of all ranks."""
        self.record()
        if not self._recorded:
            return
        self._rows = self._rows.roll(1, 0)
        self._rows[0] = self._join(self._current)
        self._current, self._recorded = torch.zeros_like(self._current), False
        self._steps += 1
        self._set_scales()

    def forget(self) -> None:
        """Leave the layers as they were; what was recorded stays."""
        for layer in self._layers:
            layer.amaxes = layer.scales = None  # type: ignore[assignment]

    def state_dict(self) -> dict[str, Any]:
        """Numbers, so that they are compared and loaded without a device. All ranks call it."""
        if self._recorded:  # in the middle of a step
            self._current = self._join(self._current)
        tables = {"rows": self._rows.tolist(), "current": self._current.tolist()}
        return {"layers": self._names, "steps": self._steps, "recorded": self._recorded, **tables}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the history of another run; of other layers, without it."""
        if state["layers"] != self._names:
            return
        self._steps, self._recorded = state["steps"], state["recorded"]
        self._rows, self._current = (self._rows.new_tensor(state[name]) for name in ("rows", "current"))
        self._set_scales()

    def _set_scales(self) -> None:
        if self._steps < WINDOW:
            return
        amaxes = self._rows.amax(0)
        amaxes = torch.where(amaxes > 0, amaxes, amaxes.amax(0))  # of a layer that was not used, the largest of all
        for column, dtype in enumerate((E4M3, E5M2)):
            self._scales[:, column] = scale_for(amaxes[:, column], dtype)
        for layer, scales in zip(self._layers, self._scales, strict=True):
            layer.scales = scales[:2]


class KeptWeights:
    """Weights in fp8, cast once an optimizer step.

    They are cast again after each optimizer step, as fused optimizers write without a trace, and whenever torch has
    counted a write to a weight or the weight lies elsewhere. Evaluation never uses them.

    Args:
        module: with the layers. A part with a method `multiplied_together` gives sequences of layers that are called
            so; these have one scale.
        layers: whose whole weights are on this device.
        emulate: as of the layers.
        compiles: whether one kernel casts a weight.
    """

    def __init__(self, module: nn.Module, layers: Sequence[nn.Linear], emulate: bool, compiles: bool) -> None:
        groups = [
            list(group)
            for part in module.modules()
            if hasattr(part, "multiplied_together")
            for group in part.multiplied_together()  # type: ignore[operator]
            if all(type(layer) is Float8Linear and layer in layers for layer in group)
        ]
        joined = {layer for group in groups for layer in group}
        self._groups = [*groups, *([layer] for layer in layers if layer not in joined)]
        self._seen: list[Any] = [None] * len(self._groups)
        self._kept: list[KeptWeight | None] = [None] * len(self._groups)
        self._emulate, self._cast = emulate, torch.compile(_rows_and_columns) if compiles else _rows_and_columns

    @torch.no_grad()
    def refresh(self) -> None:
        """Before a forward pass in training: cast what has changed."""
        for number, layers in enumerate(self._groups):
            weights: list[Tensor] = [layer.weight for layer in layers]
            seen = [(weight.data_ptr(), weight._version) for weight in weights]
            if seen == self._seen[number]:
                continue
            made, kept = KeptWeight(*self._cast(weights, self._emulate)), self._kept[number]
            if kept is None or kept.rows.device != made.rows.device:
                self._kept[number] = kept = made
            else:
                for old, new in zip(kept, made, strict=True):
                    old.copy_(new)
            self._seen[number] = seen
            self._give(layers, kept)

    def forget(self, *_: Any) -> None:
        """After an optimizer step: cast in each pass, until `refresh` is called."""
        self._seen = [None] * len(self._groups)
        for layers in self._groups:
            for layer in layers:
                layer.kept = layer.kept_together = None

    def _give(self, layers: Sequence[nn.Linear], kept: KeptWeight) -> None:
        # one of several that is called alone, as with a hook, has a scale of its own: it casts in each pass
        setattr(layers[0], "kept_together" if len(layers) > 1 else "kept", kept)


def _rows_and_columns(weights: Sequence[Tensor], emulate: bool) -> tuple[Tensor, Tensor, Tensor]:
    parts, scale = cast_weights(weights)
    rows = torch.cat(parts)
    return rows, rows.t() if emulate else rows.t().contiguous(), scale
