"""bf16 weights that keep learning: 12 bytes a parameter with AdamW, and no update lost to rounding."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import bfloat16, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parameter import is_lazy

from lightning_tricks._core.find_modules import bound_to_buffers
from lightning_tricks._trainer.objects import trainer_of
from lightning_tricks.optim.bf16_step import BF16Step
from lightning_tricks.optim.limits import refuse_limits
from lightning_tricks.precision.bf16_mixed import AutocastPrecision

__all__ = ["BF16True"]


def to_bf16(module: nn.Module) -> None:
    """Convert the parameters of a module to bf16 in place, and their gradients; a second call changes nothing.

    Buffers keep their dtype: rounding would spoil position tables and running statistics. So do the parameters that a
    layer combines with its buffers (batch norm, spectral norm), because torch wants both in one dtype.
    """
    kept = {parameter for part in module.modules() for parameter in bound_to_buffers(part)}
    chosen = {
        id(tensor): tensor
        for parameter in module.parameters()
        if parameter not in kept
        and not is_lazy(parameter)
        and parameter.dtype in (torch.float32, torch.float16, torch.float64)
        for tensor in (parameter, parameter.grad)
        if tensor is not None
    }
    # As `module.to` does it, which tells FSDP2 of its new shards, but not for buffers.
    module._apply(lambda tensor: tensor.to(bfloat16) if id(tensor) in chosen else tensor)


class BF16True(AutocastPrecision):
    """Store parameters and gradients in bf16; compute products in bf16, and each optimizer step in fp32.

    Lightning's `precision: bf16-true` rounds every update to the nearest bf16 value, so that a weight never moves if
    its updates are below half a spacing (1/512 to 1/256 of the weight). Here any optimizer computes its step in fp32,
    and the result is rounded stochastically. Autocast is on too, so that losses and softmax run in fp32, and inputs
    meet fp32 buffers without an error; under FSDP2 the sharding casts instead (`fsdp2_policy`). Buffers, batch norm and
    layers with spectral norm keep their dtype. Gradients are accumulated, clipped and measured in bf16.

    Layers that `configure_model` builds become bf16 one by one, each when it is assigned to a module: it has drawn its
    weights in fp32 until then, and the whole model never takes 4 bytes a parameter. The rest is converted when training
    starts.

    Bytes a parameter with AdamW (weight, gradient, two averages): 2 + 2 + 8 = 12. In addition, 256 MiB or the largest
    parameter's copies during a step.

    The rounding draws from no generator, so the model's random state is that of a run without the plugin. Replicas
    round alike. Seed and number of steps are in the checkpoint: a resumed run rounds as the uninterrupted one.

    Attributes:
        fsdp2_policy: for a module that shards itself: `fully_shard(block, mp_policy=plugin.fsdp2_policy)`.

    Raises:
        UsageError: when training starts, under a strategy with a precision of its own (FSDP1,
            DeepSpeed), or with an optimizer that calls its closure more than once, such as LBFGS, or that keeps the
            temporary fp32 copies of a step, as heavyball's do.

    Source: Zamirai et al. 2020, https://arxiv.org/abs/2010.06192 (stochastic rounding of the weight update).
    """

    precision: Literal["bf16-true"] = "bf16-true"

    def __init__(self) -> None:
        super().__init__()
        self._strategy: Any = None
        self._seed = 0
        self._steps: list[BF16Step] = []  # of each optimizer, during a fit
        self._counts: list[int] = []  # steps of each optimizer, after a fit

    @contextmanager
    def tensor_init_context(self) -> Iterator[None]:
        """Around `configure_model`: each layer becomes bf16 when it is assigned to a module."""

        def convert(owner: nn.Module, name: str, layer: nn.Module | None) -> None:
            if layer is not None:
                to_bf16(layer)

        # public in torch, and of all modules: so only as long as the module builds itself
        hook = register_module_module_registration_hook(convert)
        try:
            yield
        finally:
            hook.remove()

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Convert the parameters in place; find out their device, and whether FSDP2 casts."""
        module = super().convert_module(module)
        to_bf16(module)
        self._strategy = getattr(trainer_of(module), "strategy", None)
        return module

    def connect(self, model: Any, optimizers: list[Any], lr_schedulers: list[Any]) -> tuple[Any, list[Any], list[Any]]:
        """Wrap each optimizer's step, until `teardown`."""
        for optimizer in optimizers:
            refuse_limits(optimizer, "BF16True")
        # once and from rank 0: a module may set another seed during training, each rank its own
        seed = torch.initial_seed()
        self._seed = self._strategy.broadcast(seed) if self._strategy is not None else seed
        self._steps = [BF16Step(optimizer, self._seed + index) for index, optimizer in enumerate(optimizers)]
        return model, optimizers, lr_schedulers

    def state_dict(self) -> dict[str, Any]:
        """The seed of the rounding, and the number of steps of each optimizer."""
        return {"seed": self._seed, "steps": [step.steps for step in self._steps] or self._counts}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the rounding of another run."""
        self._seed = state_dict["seed"]
        for index, (step, count) in enumerate(zip(self._steps, state_dict["steps"], strict=False)):
            step.seed, step.steps = self._seed + index, count

    def teardown(self) -> None:
        """Give each optimizer back the step that it had. After it, Trainer and plugin can be pickled."""
        for step in self._steps:
            step.remove()
        self._counts, self._steps = [step.steps for step in self._steps], []
