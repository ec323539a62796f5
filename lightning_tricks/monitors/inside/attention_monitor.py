"""Log the largest attention logit of each block."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_tricks._find_modules import named_submodules
from lightning_tricks._lightning import pl, pl_import
from lightning_tricks._trainer import is_accumulating
from lightning_tricks.metrics.largest_of_ranks import LargestOfRanks
from lightning_tricks.metrics.metric_buffer import MetricBuffer
from lightning_tricks.monitors._module_calls import Undo, before_calls, in_sight

rank_zero_warn = pl_import("utilities.rank_zero").rank_zero_warn
METHOD = "max_attention_logit"


def offering(module: nn.Module) -> dict[str, nn.Module]:
    """The submodules that have a method `max_attention_logit`, by name; not those inside another that has it."""
    found: dict[str, nn.Module] = {}
    for name, submodule in named_submodules(module).items():
        if callable(getattr(submodule, METHOD, None)) and not any(name.startswith(f"{outer}.") for outer in found):
            found[name] = submodule
    return found


class AttentionMonitor(pl.Callback):
    """Record the largest attention logit of each block on each log step. Never changes training.

    `attention/<block>/max_logit` is the largest scaled product of a query and a key that the mask lets meet, in the
    last micro-batch of the step, over all heads and ranks. Where it keeps growing, attention closes in on single tokens
    and training may diverge: lower the lr, or normalise queries and keys (`qk_norm` of our decoder).

    A model offers it by a method `max_attention_logit` of its blocks or attention modules, which takes what their
    `forward` takes and returns a scalar tensor. Our decoder's blocks have it. It is called before the block runs,
    without gradients and outside any compiled graph, so the block's own computation is untouched; the price is the
    queries and keys once more, and their products in slices. A model without such a method gets one line, and nothing
    else.

    Source: Wortsman et al. 2023, https://ar5iv.labs.arxiv.org/html/2309.14322 (growth of attention logits).
    """

    def __init__(self) -> None:
        self._names: list[str] = []
        self._undo: list[Undo] = []
        self._found: dict[str, Tensor] = {}
        self._active = False
        self._warned = False

    def setup(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        """Find the buffer."""
        self._buffer = MetricBuffer.of(trainer)

    def on_fit_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Find the modules that offer it and watch them."""
        offered = offering(pl_module)
        modules = in_sight(pl_module, offered)
        self._names = list(modules)
        if not offered:
            self._warn(f"no module of {type(pl_module).__name__} has a method {METHOD}")
        elif not modules:
            self._warn("its blocks are inside a model that is compiled as a whole; compile each block instead")
        self._undo = [before_calls(module, partial(self._see, name, module)) for name, module in modules.items()]
        self._largest = LargestOfRanks(self._buffer, [f"attention/{name}/max_logit" for name in modules])

    def _warn(self, reason: str) -> None:
        if not self._warned:
            self._warned = True
            rank_zero_warn(f"AttentionMonitor records nothing: {reason}")

    def on_train_batch_start(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", batch: Any, batch_idx: int
    ) -> None:
        """Look at the last micro-batch of a log step."""
        self._found = {}
        self._active = not is_accumulating(trainer) and self._buffer.is_log_step()

    def _see(self, name: str, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._active or name in self._found:
            return
        if isinstance(module, FSDPModule):
            module.unshard()  # its own hook, which may be inside the compiled graph, then finds it done
        with torch.no_grad():
            self._found[name] = getattr(module, METHOD)(*args, **kwargs)

    def on_train_batch_end(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Hand over what was found."""
        if not self._active or not self._names:
            return
        if not self._found:
            self._warn("no block ran where it can be seen; if you use torch.compile, compile each block")
        found = {f"attention/{name}/max_logit": logit for name, logit in self._found.items()}
        self._largest.record(found, pl_module.device)

    def on_fit_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Leave the model as it was."""
        while self._undo:
            self._undo.pop()()

    def on_exception(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", exception: BaseException) -> None:
        """Leave the model as it was."""
        self.on_fit_end(trainer, pl_module)
