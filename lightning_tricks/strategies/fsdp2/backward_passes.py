"""Backward passes under FSDP2: which of a step's sums gradients over the ranks, and several in one `training_step`.

`WaitingGradients` is for micro-batches, `GatherOnCall` for manual optimization.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

from lightning_tricks._core.errors import UsageError, check_choice
from lightning_tricks.parallel.shard import drop_gathered
from lightning_tricks.parallel.tensor import is_sharded

Reduction = Literal["micro_batch", "step"]


class WaitingGradients:
    """Tell FSDP2 in which micro-batches it sums gradients over the ranks.

    FSDP2 keeps the whole gradient that waits in a private field of each parameter, `unsharded_accumulated_grad`, read
    from torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py.

    Args:
        reduction: see `FSDP2Strategy.reduce_gradients`.

    Raises:
        UsageError: another word.
    """

    def __init__(self, reduction: Reduction) -> None:
        check_choice("reduce_gradients", reduction, Reduction)
        self.reduction = reduction
        self.waiting = False

    def forget(self, module: nn.Module) -> None:
        """Drop what an earlier fit of a sharded module left, if it failed within a step: gathered weights, gradients.

        torch has a function for it since 2.13; before, FSDP2 refuses the next fit.
        """
        self.waiting = False
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.set_requires_gradient_sync(True, recurse=False)
        reset: Any = getattr(module, "reset_iter_state", None)
        if reset is not None:
            reset()
        for group in _groups(module):
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):  # the same, where gradients are reduced in its own dtype
                    parameter._unsharded_param.grad = None

    def before_backward(self, module: nn.Module, accumulates: bool) -> None:
        """Choose for the backward pass of a micro-batch, after which others of the same step may follow."""
        if self.reduction == "micro_batch" or accumulates == self.waiting or not isinstance(module, FSDPModule):
            return
        self.waiting = accumulates
        module.set_requires_gradient_sync(not accumulates)

    def then_summed(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The closure of an optimizer step, which fails where gradients wait after it."""

        def run() -> Any:
            loss = closure()
            if self.waiting:
                raise UsageError(
                    f"reduce_gradients={self.reduction!r}: training_step returned None for the last micro-batch of a "
                    "step, in whose backward pass gradients are summed over the ranks: take micro_batch"
                )
            return loss

        return run


def _groups(module: nn.Module) -> Iterator[Any]:
    """FSDP2's groups of parameters that are gathered together."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            state: Any = part._get_fsdp_state()
            group = state._fsdp_param_group  # torch 2.13 has a list beside it, of one group here
            if group is not None:
                yield group


@dataclass
class _Parameter:
    """A parameter of a sharded model, in both of its forms: gathered (whole) and sharded."""

    name: str  # in the whole model, for messages
    owner: nn.Module
    local_name: str  # in `owner`
    sharded: Any = None  # the form that the optimizer has; None until it was first seen in `owner`
    trained: bool = True  # its `requires_grad` when it was last gathered

    @property
    def registered(self) -> Any:  # the form that `owner` has at the moment
        return self.owner._parameters[self.local_name]

    @property
    def is_whole(self) -> bool:
        return not is_sharded(self.registered)

    def follow_requires_grad(self) -> None:
        """Freeze or unfreeze both forms if one was since the gathering: `toggle_optimizer` changes only shards."""
        if not self.is_whole:
            self.sharded, self.trained = self.registered, self.registered.requires_grad
        elif self.sharded is not None and self.registered.requires_grad != self.sharded.requires_grad:
            self.trained = not self.trained
            self.registered.requires_grad_(self.trained)
            self.sharded.requires_grad_(self.trained)


class GatherOnCall:
    """Gather the parameters that belong to no block at the start of a step and whenever a part of the model is called.

    Each backward pass shards all parameters again, and an optimizer step makes gathered ones stale. Under automatic
    optimization both come after `training_step`; under manual optimization they come within it, and the step may call
    modules after them.

    Args:
        root: a LightningModule that `shard_module` has sharded.
        blocks: its blocks, which gather themselves.
    """

    def __init__(self, root: Any, blocks: Collection[nn.Module]) -> None:
        self.root = root
        inside = {part for block in blocks for part in block.modules() if part is not block}
        called = [part for part in root.modules() if part not in inside]
        self.parameters = [
            _Parameter(f"{path}.{name}".lstrip("."), owner, name)
            for path, owner in root.named_modules()
            for name, parameter in owner.named_parameters(recurse=False)
            if is_sharded(parameter)  # scalars never are
        ]
        groups: list[Any] = [part for part in root.modules() if isinstance(part, FSDPModule) and part is not root]
        gather_themselves = {part for group in groups for part in group.modules()}
        self.of_root = [parameter for parameter in self.parameters if parameter.owner not in gather_themselves]
        # FSDP2's hooks around the root's own forward would end the step when a backward pass reaches the root's input
        state = root._get_fsdp_state()
        state._pre_forward_hook_handle.remove()
        state._post_forward_hook_handle.remove()
        root._run_gathered = lambda function: function()
        register_fsdp_forward_method(root, "_run_gathered")
        for part in called:
            below = set(part.modules())
            own = [parameter for parameter in self.parameters if parameter.owner in below]
            part.register_forward_pre_hook(self._before_call(own), prepend=True)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around `training_step`: gather parameters at its start, and shard them after it."""
        drop_gathered(self.root)
        self._gather()
        try:
            yield
        except RuntimeError as error:
            if "mixed torch.Tensor and DTensor" not in str(error):
                raise
            raise UsageError(
                f"{type(self.root).__mro__[2].__name__}.training_step uses a sharded parameter: after manual_backward "
                "and optimizer.step parameters are gathered when a module is called, so put the computation into the "
                "forward of a module that holds them, and call it"
            ) from error
        finally:
            drop_gathered(self.root)

    def before_backward(self, loss: Tensor) -> Tensor:
        """A copy of `loss` whose backward pass gathers the root's parameters, reduces their gradients, shards them."""
        return self.root._run_gathered(loss.clone)

    def refuse_gradients_of_whole_parameters(self) -> None:
        """Refuse an optimizer step after a backward pass that did not go through FSDP2, which reduces gradients."""
        for parameter in self.parameters:
            if parameter.is_whole and parameter.registered.grad is not None:
                raise UsageError(
                    f"the gradient of '{parameter.name}' was not reduced over the devices: "
                    "call self.manual_backward(loss) in place of loss.backward()"
                )

    def _gather(self) -> None:
        for parameter in self.of_root:
            parameter.follow_requires_grad()
        self.root._run_gathered(lambda: None)

    def _before_call(self, own: list[_Parameter]) -> Any:
        @torch.compiler.disable
        def hook(part: nn.Module, args: Any) -> None:
            if self.of_root and not self.of_root[0].is_whole:
                self._gather()
            for parameter in own:
                parameter.follow_requires_grad()

        return hook
