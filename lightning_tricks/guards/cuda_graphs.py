"""Launch the forward and the backward pass of a micro-batch as one CUDA graph each.

In a small model, or a small micro-batch, a kernel ends before the host has launched the next one. A graph launches all
of them at once.
"""

from collections.abc import Callable
from contextlib import ExitStack
from traceback import extract_tb
from typing import Any

import torch
from torch import Tensor, autograd, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.protocols import CountsInBackward, KeepsTokenLosses, MeasuresForward
from lightning_tricks._core.replaced import replaced
from lightning_tricks._core.tensors import refuse_second_derivative
from lightning_tricks._trainer.lightning import Module, Trainer, pl, rank_zero_warn
from lightning_tricks._trainer.objects import compiled_steps, is_a
from lightning_tricks._trainer.run_facts import is_on_one_device

__all__ = ["CUDAGraphs"]

EAGER_FIRST = 3  # calls of one form before its capture: they compile, choose algorithms and show who has a gradient
MOST_FORMS = 8


def capture(run: Callable[[], Any], pool: Any) -> Callable[[], None]:
    """Record the kernels that `run` launches, without running them; a call of the result runs them."""
    graph = torch.cuda.CUDAGraph()
    # other threads may go on, such as the one that pins the memory of batches
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        run()
    return graph.replay


class _Form:
    """Calls whose arguments have one form: structure, shapes, dtypes, and values that are no tensors."""

    def __init__(self, key: list[Any]) -> None:
        self.key, self.calls = key, 0
        self.trained: list[nn.Parameter] = []  # that have a gradient after a backward pass
        self.forward: Callable[[], None] | None = None  # once captured

    def capture(self, call: Callable[..., Any], leaves: list[Any], counting: list[Any], pool: Any) -> None:
        """Capture a call, and its backward pass into the gradients that the parameters have."""
        self.inputs = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        args, kwargs = tree_unflatten(self.inputs, self.key[0])
        live: list[Any] = []

        def forward() -> list[Any]:
            live[:], self.structure = tree_flatten(call(*args, **kwargs))
            return live

        torch.clear_autocast_cache()  # casts made in a graph are for the graph alone, and it needs its own
        replay = capture(forward, pool)
        torch.clear_autocast_cache()
        self.places = [place for place, one in enumerate(live) if isinstance(one, Tensor) and one.requires_grad]
        self.gradients = [torch.zeros_like(live[place]) for place in self.places]
        with torch.autocast(self.gradients[0].device.type, enabled=False):  # as in Lightning's backward pass
            self.backward = capture(lambda: autograd.backward([live[at] for at in self.places], self.gradients), pool)
        self.counted = [(router.backward_loads, router.backward_loads.pop()) for router in counting]
        # without their history, whose nodes would keep the stream of the capture for passes without a graph
        self.outputs = [one.detach() if isinstance(one, Tensor) else one for one in live]
        self.forward = replay


class _Replay(autograd.Function):
    """The two graphs as one operation; parameters get their gradients within the second one."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, form: _Form, running: set[Any]) -> tuple[Any, ...]:
        ctx.form, ctx.running = form, running
        running.add(form)
        assert form.forward is not None
        form.forward()
        # copies, as the next micro-batch writes into the same memory
        outputs = [one.clone() if isinstance(one, Tensor) else one for one in form.outputs]
        fixed = [one for place, one in enumerate(outputs) if isinstance(one, Tensor) and place not in form.places]
        ctx.mark_non_differentiable(*fixed)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        refuse_second_derivative("a CUDA graph", "leave CUDAGraphs out for it")
        form = ctx.form
        if form not in ctx.running:
            raise UsageError("CUDAGraphs: a micro-batch has a second backward pass: leave CUDAGraphs out")
        ctx.running.clear()
        for own, place in zip(form.gradients, form.places, strict=True):
            own.copy_(gradients[place])
        form.backward()
        for loads, load in form.counted:
            loads.append(load.clone())
        return None, None, None


class _Calls:
    """The calls of a module in a fit, by graphs once they are captured.

    Attributes:
        form: of the first call in the running micro-batch; None without one, or if there are too many forms.
        running: forms that are replayed, with the backward pass to come.
    """

    def __init__(self, model: Any, measuring: list[Any], device: torch.device) -> None:
        for name, one in model.named_parameters():
            if one._backward_hooks or one._post_accumulate_grad_hooks:
                raise UsageError(f"CUDAGraphs: '{name}' has a hook on its gradient, which a graph does not call")
        self.name = "forward" if model._compiled_call_impl is None else "_compiled_call_impl"  # which traces `forward`
        self.model, self._plain, self._measuring = model, getattr(model, self.name), measuring
        self.form: _Form | None = None
        self.running: set[Any] = set()
        self.forms: list[_Form] = []
        parts = [*model.modules()]
        self._keeping: list[Any] = [part for part in parts if isinstance(part, KeepsTokenLosses)]
        self._counting = [part for part in parts if isinstance(part, CountsInBackward)]
        self._places = [(own, name) for part in parts for own in (part._parameters, part._buffers) for name in own]
        self._memory: list[Any] = []  # of the weights that graphs read
        self._buffers: dict[nn.Parameter, Tensor] = {}  # the gradients into which graphs add
        self._anchor = torch.empty(0, device=device, requires_grad=True)
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        if not (self.model.training and torch.is_grad_enabled()) or self.form is not None:
            return self._plain(*args, **kwargs)
        leaves, structure = tree_flatten((args, kwargs))
        form = self._form_of([structure, *map(_kind, leaves), [part.token_losses is None for part in self._keeping]])
        if form is None:
            return self._plain(*args, **kwargs)
        form.calls += 1
        if form.calls <= EAGER_FIRST or any(callback.measures_forward for callback in self._measuring):
            return self._plain(*args, **kwargs)
        if form.forward is None:
            self._capture(form, leaves)
        for own, new in zip(form.inputs, leaves, strict=True):
            if isinstance(new, Tensor):
                own.copy_(new)
        outputs = _Replay.apply(self._anchor, form, self.running)
        result, losses = tree_unflatten(outputs, form.structure)
        for part, found in zip(self._keeping, losses, strict=True):
            if found is not None:
                part.token_losses[:] = found
        return result

    def _form_of(self, key: list[Any]) -> _Form | None:
        """The form of a call; None if there are too many. Graphs of weights that lie elsewhere now are dropped."""
        found = [own[name] for own, name in self._places]
        memory = [None if one is None else (one.data_ptr(), one.requires_grad) for one in found]
        if memory != self._memory:
            self._memory, self.forms, self._buffers = memory, [], {}
        self.form = next((form for form in self.forms if form.key == key), None)
        if self.form is None and len(self.forms) < MOST_FORMS:
            self.form = _Form(key)
            self.forms.append(self.form)
        return self.form

    def _capture(self, form: _Form, leaves: list[Any]) -> None:
        def call(*args: Any, **kwargs: Any) -> Any:
            return self._plain(*args, **kwargs), [part.token_losses for part in self._keeping]

        self.use_buffers(form)
        try:
            form.capture(call, leaves, self._counting, self._pool)
        except (UsageError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            first: BaseException = error  # of those that came of one another
            while first.__context__ is not None:
                first = first.__context__
            own = [frame for frame in extract_tb(first.__traceback__) if "/torch/" not in frame.filename]
            raise UsageError(
                f"CUDAGraphs: {type(self.model).__name__} cannot be captured, {own[-1].filename}:{own[-1].lineno}: "
                f"{[*str(first).splitlines(), type(first).__name__][0]}: let nothing in it wait for the device, keep "
                "no earlier loss with its history, or leave CUDAGraphs out"
            ) from error

    @torch.no_grad()
    def use_buffers(self, form: _Form) -> None:
        """Let the gradients lie where graphs add to them, with what they are."""
        if empty := [self._buffers[parameter] for parameter in form.trained if parameter.grad is None]:
            torch._foreach_zero_(empty)
        for parameter in form.trained:
            buffer = self._buffers[parameter]
            if parameter.grad is not None and parameter.grad is not buffer:
                buffer.copy_(parameter.grad)
            parameter.grad = buffer

    def see_trained(self, form: _Form) -> None:
        """See who has a gradient: to others an optimizer must not apply one of zeros."""
        form.trained = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
        for parameter in form.trained:
            if parameter not in self._buffers:
                self._buffers[parameter] = torch.zeros_like(parameter.grad)  # type: ignore[arg-type]


class CUDAGraphs(pl.Callback):
    """Changes how a model is run in training: by CUDA graphs, with the same kernels and numbers as without.

    The calls of one module are captured, with their backward passes, which add to the gradients. All else runs as
    before, and so do the first three calls, those of a validation, a second one in a micro-batch, and those that a
    monitor measures, as ActivationMonitor does on log steps. Each form of the arguments has graphs of its own, up to
    eight.

    Captured code runs no Python any more: hooks in it are not called, and numbers that change from call to call must
    be tensors among its arguments.

    Args:
        module: name of the submodule that is captured, such as `model`. None: the child of the LightningModule that has
            all trained parameters, as `decoder` in LanguageModel.

    Raises:
        UsageError: no CUDA; a strategy of several devices; delayed scales of Float8; manual optimization; a
            LightningModule compiled as a whole; no such module, or hooks on its gradients; in training, a pass
            that cannot be captured.

    Source: `torch.cuda.make_graphed_callables`, whose gradients are not accumulated
        (https://docs.pytorch.org/docs/stable/generated/torch.cuda.make_graphed_callables.html); the error mode is that
        of https://github.com/pytorch/torchtitan/blob/main/torchtitan/distributed/cudagraph.py.
    """

    def __init__(self, module: str | None = None) -> None:
        self.module, self._attached = module, ExitStack()
        self._calls: _Calls | None = None

    def check_run(self, trainer: Any, datamodule: Any, stage: str) -> None:
        """Refuse a run without CUDA, or on several devices, before any process is started."""
        if stage == "fit" and not is_a(trainer.accelerator, "CUDAAccelerator"):
            raise UsageError(f"CUDAGraphs: {type(trainer.accelerator).__name__} has no CUDA graphs: leave it out")
        if stage == "fit" and not is_on_one_device(trainer):
            raise UsageError(
                f"CUDAGraphs: {type(trainer.strategy).__name__} joins ranks in hooks that a graph does not call: train "
                "on one device, or leave it out"
            )
        if stage == "fit" and getattr(trainer.precision_plugin, "scaling", "dynamic") != "dynamic":
            raise UsageError(
                "CUDAGraphs: Float8.scaling=delayed takes what each backward pass finds, which a replay does not give: "
                "set scaling: dynamic, or leave CUDAGraphs out"
            )

    def on_fit_start(self, trainer: Trainer, pl_module: Module) -> None:
        """Refuse a run that cannot be captured."""
        self.check_run(trainer, None, "fit")
        if not pl_module.automatic_optimization or compiled_steps(pl_module) is not None:
            raise UsageError(
                f"CUDAGraphs: {type(pl_module).__name__} steps its optimizer itself, or is compiled as a whole: let "
                "Lightning step and compile the blocks, or leave CUDAGraphs out"
            )

    def on_train_batch_start(self, trainer: Trainer, pl_module: Module, batch: Any, batch_idx: int) -> None:
        """Take over the calls before the first batch: any hook before it may still compile modules."""
        if self._calls is None:
            callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
            measuring = [callback for callback in callbacks if isinstance(callback, MeasuresForward)]
            self._calls = _Calls(_find(pl_module, self.module), measuring, pl_module.device)
            self._attached.enter_context(replaced(self._calls.model, self._calls.name, self._calls))
        self._calls.form = None
        self._calls.running.clear()

    def on_before_backward(self, trainer: Trainer, pl_module: Module, loss: Tensor) -> None:
        """After `zero_grad`, prepare the gradients, also for a pass without a graph."""
        if self._calls is not None and self._calls.form is not None:
            self._calls.use_buffers(self._calls.form)

    def on_after_backward(self, trainer: Trainer, pl_module: Module) -> None:
        """Before a capture, see who has a gradient."""
        if self._calls is not None and self._calls.form is not None and self._calls.form.forward is None:
            self._calls.see_trained(self._calls.form)

    def on_train_end(self, trainer: Trainer, pl_module: Module) -> None:
        """Leave the module as it was, and free the graphs; say if nothing was captured."""
        if self._calls is not None and not self._calls.forms:
            rank_zero_warn(f"CUDAGraphs captured nothing: no training_step calls {type(self._calls.model).__name__}")
        self._attached.close()
        self._calls = None

    def on_exception(self, trainer: Trainer, pl_module: Module, exception: BaseException) -> None:
        """Leave the module as it was, and free the graphs."""
        self._attached.close()
        self._calls = None


def _find(pl_module: Any, name: str | None) -> nn.Module:
    """The submodule of this name, or without a name the child that has all trained parameters."""
    children = dict(pl_module.named_children())
    trained = {parameter for parameter in pl_module.parameters() if parameter.requires_grad}
    fits = [child for child in children.values() if trained <= {*child.parameters()}]
    found = dict(pl_module.named_modules()).get(name) if name is not None else next(iter(fits), None)
    if found is None:
        what = "no child has all trained parameters" if name is None else "there is no such submodule"
        raise UsageError(f"CUDAGraphs.module={name}: {what}: name one, such as {', '.join(children)}")
    return found


def _kind(leaf: Any) -> Any:
    """What a graph cannot change of an argument."""
    if not isinstance(leaf, Tensor):
        return type(leaf), leaf
    if leaf.requires_grad:
        raise UsageError("CUDAGraphs.module: its input needs a gradient: name a module that begins with the batch")
    return leaf.shape, leaf.dtype, leaf.device
