"""Log the largest attention logit of each block."""

from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_tricks._core.find_modules import named_submodules
from lightning_tricks._trainer.lightning import Module, Trainer
from lightning_tricks.monitors._module_calls import ModuleMonitor, before_calls, outside_compiled

__all__ = ["AttentionMonitor"]

METHOD = "max_attention_logit"


def modules_with_max_logit(module: nn.Module) -> dict[str, nn.Module]:
    """The outermost submodules that have a method `max_attention_logit`, by name."""
    found: dict[str, nn.Module] = {}
    for name, submodule in named_submodules(module).items():
        if callable(getattr(submodule, METHOD, None)) and not any(name.startswith(f"{outer}.") for outer in found):
            found[name] = submodule
    return found


class AttentionMonitor(ModuleMonitor):
    """Record the largest attention logit of each block on each log step. Never changes training.

    `attention/<block>/max_logit` is the largest scaled product of a query and a key that the mask lets meet, in the
    last micro-batch of the step, over all heads and ranks; with pipeline stages, in the first part of that. Where it
    keeps growing, attention closes in on single tokens and training may diverge: lower the lr, or normalise queries and
    keys (`qk_norm` of our decoder).

    The model's blocks or attention modules need a method `max_attention_logit` with the arguments of their `forward`,
    which returns a scalar tensor. Our decoder's blocks have it. It is called before the block runs, without gradients
    and outside any compiled graph, so the block's own computation does not change. The cost: queries and keys are
    computed once more, and their products in slices. For a model without such a method, one warning is printed and
    nothing is recorded.

    Source: Wortsman et al. 2023, https://ar5iv.labs.arxiv.org/html/2309.14322 (growth of attention logits).
    """

    def __init__(self) -> None:
        super().__init__("AttentionMonitor records nothing: {}")

    def on_fit_start(self, trainer: Trainer, pl_module: Module) -> None:
        """Watch the modules with the method from the first batch."""
        self.begin_fit(trainer, partial(self._watch_modules, pl_module))

    def _watch_modules(self, pl_module: Module) -> None:
        with_method = modules_with_max_logit(pl_module)
        self.watch(outside_compiled(pl_module, with_method), before_calls, _max_logit)
        if not with_method:
            self.warn(f"no module of {type(pl_module).__name__} has a method {METHOD}")
        elif not self._names:
            self.warn("its blocks are inside a model that is compiled as a whole; compile each block instead")

    def on_train_batch_end(self, trainer: Trainer, pl_module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Record the measurements of a log step."""
        unseen = "no block ran where it can be seen; if you use torch.compile, compile each block"
        found = self.end_batch(unseen)
        if found is None:
            return
        logits = {f"attention/{name}/max_logit": logit for name, logit in found.items()}
        self._buffer.record_largest([f"attention/{name}/max_logit" for name in self._names], logits)


def _max_logit(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    if isinstance(module, FSDPModule):
        module.unshard()  # its own hook, which may be inside the compiled graph, then finds it done
    return getattr(module, METHOD)(*args, **kwargs)
