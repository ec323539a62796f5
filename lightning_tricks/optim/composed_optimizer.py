"""Several optimizers as one: what Lightning's automatic optimization, a schedule, a clip and a checkpoint expect.

`MuonAdamW` and `MatrixAdamW` have one for the hidden matrices of a model, and AdamW for the rest.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.protocols import SkipsOnDevice
from lightning_tricks._core.replaced import replaced
from lightning_tricks.optim.adamw_cautious_decay import AdamWCautiousDecay
from lightning_tricks.optim.muon import Coefficients, Muon

__all__ = ["ComposedOptimizer", "MatrixAdamW", "MuonAdamW"]

Factory = Callable[[Iterable], Optimizer]


class ComposedOptimizer(Optimizer):
    """One optimizer made of several, each with groups of its own; groups and state are shared with them.

    A schedule, a clip, a gradient scaler, a monitor and a checkpoint see one optimizer. A group goes to the optimizer
    that its key `optimizer` names (from `ParamRule.optimizer`), else to `default`.

    Args:
        params: groups, such as those of `decay_groups`.
        optimizers: by name, a function that makes an optimizer from groups.
        default: name of the optimizer for groups that name none. None: such groups are an error.

    Raises:
        UsageError: a group names an unknown optimizer, or none while there is no `default`; an optimizer gets no
            parameter.

    Example:
        >>> matrix, bias = torch.nn.Parameter(torch.eye(2)), torch.nn.Parameter(torch.zeros(2))
        >>> groups = [{"params": [matrix], "optimizer": "sgd"}, {"params": [bias]}]
        >>> made = {"sgd": lambda g: torch.optim.SGD(g, lr=0.1), "adamw": lambda g: torch.optim.AdamW(g, lr=0.01)}
        >>> [group["lr"] for group in ComposedOptimizer(groups, made, default="adamw").param_groups]
        [0.1, 0.01]
    """

    optimizers: Mapping[str, Optimizer] = {}

    def __init__(self, params: Iterable, optimizers: Mapping[str, Factory], default: str | None = None) -> None:
        self._names, self._default = list(optimizers), default
        super().__init__(params, {})
        made = {}
        for name, make in optimizers.items():
            own = [group for group in self.param_groups if group["optimizer"] == name]
            if not own:
                raise UsageError(
                    f"optimizers: {name!r} gets no parameter: write a rule with optimizer: {name}, or leave it out"
                )
            made[name] = make(own)
        self.optimizers = made
        for optimizer in made.values():
            self.state.update(optimizer.state)
        self._share()

    @property
    def skips_on_device(self) -> bool:
        """Whether each of the optimizers can skip a step by `found_inf`, without a look at it on the host."""
        return all(map(skips_on_device, self.optimizers.values()))

    def _share(self) -> None:
        """Let each optimizer use the groups that name it, and the state of this one."""
        for name, optimizer in self.optimizers.items():
            own = [group for group in self.param_groups if group["optimizer"] == name]
            optimizer.__setstate__({"state": self.state, "param_groups": own})

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and copies: the optimizers too."""
        own = {name: getattr(self, name) for name in ("optimizers", "_names", "_default")}
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Called by `load_state_dict`, with new groups and a new state."""
        super().__setstate__(state)
        self._share()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, to the optimizer that it names."""
        name = param_group["optimizer"] = param_group.get("optimizer") or self._default
        super().add_param_group(param_group)
        if name not in self._names:
            first = param_group.get("param_names", ["a parameter"])[0]
            what = "no optimizer" if name is None else f"optimizer {name!r}, which is not there"
            raise UsageError(
                f"optimizers: '{first}' of group {param_group.get('name', len(self.param_groups) - 1)!r} has {what}: "
                f"name one of {', '.join(self._names)} in the rule that fits it (ParamRule.optimizer)"
            )
        if name in self.optimizers:  # in the constructor there is none yet: it builds them from the finished groups
            self.optimizers[name].add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """A step of each optimizer, in their order; the closure runs once, before the first."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        skip = getattr(self, "found_inf", None)
        for optimizer in self.optimizers.values():
            if skip is None:
                optimizer.step()
                continue
            with replaced(optimizer, "found_inf", skip), replaced(optimizer, "grad_scale", None):
                optimizer.step()
        return loss


def skips_on_device(optimizer: Optimizer) -> bool:
    """Whether a step of the optimizer changes nothing where its attribute `found_inf`, a 0-dim tensor, is 1.

    Fused Adam and AdamW check it in their kernels; other optimizers declare it by an attribute `skips_on_device`. Fused
    SGD does not count: a skipped first step would leave its momentum without a value.
    """
    if isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
        return all(group.get("fused") for group in optimizer.param_groups)
    return isinstance(optimizer, SkipsOnDevice) and optimizer.skips_on_device


_LISTS = ("params", "param_names", "roles", "layouts")  # of a group, one entry a parameter


class _HiddenAndAdamW(ComposedOptimizer):
    """One optimizer for hidden matrices, AdamW for the rest; each group is split in two.

    Args:
        params: groups of `decay_groups`; the optimizer that the rule of a group names has all of it.
        name: of the first optimizer.
        takes: of (role, parameter), whether the first optimizer steps it.
        make: makes the first optimizer.
        adamw_class: of the other one.
        **adamw: settings of AdamW.
    """

    def __init__(
        self,
        params: Iterable,
        name: str,
        takes: Callable[[str, Tensor], bool],
        make: Factory,
        adamw_class: Callable[..., Optimizer] = torch.optim.AdamW,
        **adamw: Any,
    ) -> None:
        made = {name: make, "adamw": lambda own: adamw_class(own, **adamw)}
        groups = [part for group in params for part in self._split(group, list(made), takes)]
        named = {group["optimizer"] for group in groups}
        if name not in named:
            raise UsageError(f"{type(self).__name__}: the model has no hidden matrix: take torch.optim.AdamW")
        super().__init__(groups, {name: make for name, make in made.items() if name in named})

    def _split(self, group: Any, names: list[str], takes: Callable[[str, Tensor], bool]) -> Iterator[dict[str, Any]]:
        """The parts of a group that go to each of the two optimizers, without empty ones."""
        owner = type(self).__name__
        if not isinstance(group, dict) or "roles" not in group:
            raise UsageError(f"{owner}: its groups do not tell the role of each parameter: make them by decay_groups")
        chosen = group.get("optimizer")
        if chosen not in (None, *names):
            raise UsageError(f"param_rules: optimizer={chosen!r} of {group['name']}: {owner} has {' and '.join(names)}")
        pairs = zip(group["roles"], group["params"], strict=True)
        goes_to = [chosen or names[0 if takes(role, param) else 1] for role, param in pairs]
        for name in names:
            entries = [index for index, optimizer in enumerate(goes_to) if optimizer == name]
            if entries:
                lists = {key: [group[key][index] for index in entries] for key in _LISTS}
                yield {**group, **lists, "optimizer": name, "name": f"{name}:{group['name']}"}


class MatrixAdamW(_HiddenAndAdamW):
    """An optimizer of your choice for hidden matrices; AdamW for embeddings, heads, norms, biases and other vectors.

    For optimizers that use the rows and columns of a matrix, such as SOAP, Shampoo and NorMuon: for an embedding or a
    head, some would keep a square matrix as wide as the vocabulary. Stacks of experts go to AdamW, because libraries
    treat a stack as one matrix. A rule with `optimizer: matrices` or `adamw` decides first. Each group is split in two,
    named `matrices:decay`, `adamw:decay`, and so on. Groups of matrices have a key `use_muon`, which those optimizers
    of pytorch_optimizer require that orthogonalize.

    Args:
        params: groups of `decay_groups`.
        matrices: makes the optimizer of the hidden matrices from groups; its learning rate is its own.
        lr: of AdamW. 3e-4 as `default_adamw`.
        betas: of AdamW.
        eps: of AdamW.
        fused: AdamW's single kernel for all of its parameters.

    Raises:
        UsageError: groups without roles; a rule that names another optimizer; a model without hidden matrices.

    Source: Vyas et al. 2024 (SOAP), https://arxiv.org/abs/2409.11321, and Keller Jordan 2024 (Muon),
        https://kellerjordan.github.io/posts/muon/, which leave embeddings and heads to AdamW.
    """

    def __init__(
        self,
        params: Iterable,
        matrices: Factory,
        lr: float = 3e-4,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        fused: bool = True,
    ) -> None:
        def takes(role: str, param: Tensor) -> bool:
            return (role == "matrix" or (role == "expert" and param.ndim == 2)) and not param.is_complex()

        def make(own: Iterable) -> Optimizer:
            for group in own:
                group["use_muon"] = True
            return matrices(own)

        super().__init__(params, "matrices", takes, make, lr=lr, betas=betas, eps=eps, fused=fused)


class MuonAdamW(_HiddenAndAdamW):
    """Muon for hidden matrices and experts; AdamW for embeddings, heads, routers, norms, biases and other vectors.

    The role of each parameter comes from `decay_groups`; a rule with `optimizer: adamw` or `muon` decides first. Muon's
    updates are scaled to the size of AdamW's, so that one `lr` and one decay, those of AdamW, fit both; not so with
    `muon_lr`. Each group is split in two, named `muon:decay`, `adamw:decay`, and so on.

    Args:
        params: groups of `decay_groups`.
        lr: of AdamW, and of Muon unless it has its own. 3e-4 as `default_adamw`.
        muon_lr: of Muon, whose updates then have their original scale; 0.02 in the first source. None: `lr`.
        betas: of AdamW.
        eps: of AdamW.
        momentum: of Muon.
        momentum_warmup_steps: steps over which it rises from 0.85; 0 for none.
        cautious_weight_decay: a weight decays only in steps whose update moves it towards 0, as in AdamWCautiousDecay.
        coefficients: of Muon's Newton-Schulz, `keller_jordan` or `polar_express`.
        normuon_beta2: of NorMuon, which gives each row of an update the same size on average; None for Muon.
        fused: AdamW's single kernel for all of its parameters.

    Raises:
        UsageError: groups without roles; a fused projection whose rows are unknown; a model without hidden matrices; a
            Tensor as learning rate; an error of Muon.

    Source: Keller Jordan 2024, https://kellerjordan.github.io/posts/muon/ (which parameters); Liu et al. 2025
        (Moonlight), https://arxiv.org/abs/2502.16982 (one learning rate).
    """

    def __init__(
        self,
        params: Iterable,
        lr: float = 3e-4,
        muon_lr: float | None = None,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        momentum: float = 0.95,
        momentum_warmup_steps: int = 0,
        cautious_weight_decay: bool = False,
        coefficients: Coefficients = "keller_jordan",
        normuon_beta2: float | None = None,
        fused: bool = True,
    ) -> None:
        if isinstance(lr, Tensor) or isinstance(muon_lr, Tensor):
            raise UsageError("MuonAdamW.lr is a Tensor: give a float, which the schedule sets at each step")

        def takes(role: str, param: Tensor) -> bool:
            return role in ("matrix", "expert") and not param.is_complex()

        def make(own: Iterable) -> Muon:
            for group in own:
                for name, layout in zip(group["param_names"], group["layouts"], strict=True):
                    if layout is not None and layout["parts"] is None:
                        raise UsageError(
                            f"MuonAdamW: '{name}' seems to hold several projections, of rows that nobody knows: name "
                            "them in a dict _matrices of its module, or write a rule with optimizer: adamw for it"
                        )
            scale: Any = "match_rms_adamw" if muon_lr is None else "original"
            rate = lr if muon_lr is None else muon_lr
            return Muon(own, rate, momentum, adjust_lr_fn=scale, momentum_warmup_steps=momentum_warmup_steps,
                        cautious_weight_decay=cautious_weight_decay, coefficients=coefficients,
                        normuon_beta2=normuon_beta2)  # fmt: skip

        adamw = AdamWCautiousDecay if cautious_weight_decay else torch.optim.AdamW
        super().__init__(params, "muon", takes, make, adamw, lr=lr, betas=betas, eps=eps, fused=fused)
