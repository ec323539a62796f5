"""No derivative of ours is wrong in silence: each `autograd.Function` has a right second one, or an error."""

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function, grad, gradgradcheck
from torch.nn import functional as F

import lightning_tricks
from lightning_tricks._core.errors import UsageError
from lightning_tricks.commands.plan.memory_trace import _FusedRMSNorm
from lightning_tricks.guards.cuda_graphs import _Replay
from lightning_tricks.models.attention import OWN_NORM_FROM, RMSNorm, _RMSNormOnCPU
from lightning_tricks.models.fused_linear import _Product
from lightning_tricks.models.linear_cross_entropy import _LinearCrossEntropy, linear_cross_entropy
from lightning_tricks.models.moe import _Dispatch
from lightning_tricks.parallel.experts import Permute, _Send
from lightning_tricks.parallel.pipeline import SetAside, _HasGradients
from lightning_tricks.precision.float8_linear import _Products


def numbers(*shape: int, **options: Any) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, **options).requires_grad_()


DOUBLE = {"dtype": torch.float64}
LABELS = torch.tensor([0, 3, 1])
ORDER = torch.tensor([2, 0, 3, 1])
GRAPHS: Any = Mock(outputs=[torch.ones(())], places=[0])
# Of each function: a call on tensors that require gradients, and whether it has a second derivative.
CASES: dict[type[Function], tuple[Callable[..., Tensor], list[Tensor], bool]] = {
    _RMSNormOnCPU: (
        lambda x, weight: _RMSNormOnCPU.apply(x, weight, 1e-5)[0], [numbers(3, 4, **DOUBLE), numbers(4, **DOUBLE)], True
    ),
    _LinearCrossEntropy: (
        lambda x, weight: linear_cross_entropy(x, weight, LABELS), [numbers(3, 4), numbers(5, 4)], False
    ),
    _Product: (
        lambda x, *parameters: _Product.apply(x, 2, *parameters),
        [numbers(*shape, **DOUBLE) for shape in ((2, 3, 4), (3, 4), (2, 4), (3,), (2,))], True,
    ),
    _Dispatch: (lambda x: _Dispatch.apply(x, ORDER, ORDER.argsort(), 2), [numbers(2, 3, **DOUBLE)], True),
    Permute: (lambda x: Permute.apply(x, ORDER, ORDER.argsort()), [numbers(4, 3, **DOUBLE)], True),
    _Send: (lambda x: _Send.apply(x, [4], [4], None), [numbers(4, 3, **DOUBLE)], True),
    _HasGradients: (
        lambda anchor: _HasGradients.apply(torch.ones(()), anchor, SetAside()),
        [torch.zeros((), requires_grad=True)], False,
    ),
    _Products: (
        lambda x, weight: _Products.apply(x, None, None, None, None, None, True, weight)[0],
        [numbers(16, 32), numbers(16, 32)], False,
    ),
    _Replay: (lambda anchor: _Replay.apply(anchor, GRAPHS, set())[0], [torch.zeros((), requires_grad=True)], False),
    _FusedRMSNorm: (lambda x, weight: _FusedRMSNorm.apply(x, weight, 1), [numbers(3, 4), numbers(4)], False),
}  # fmt: skip


def functions() -> set[type[Function]]:
    for module in pkgutil.walk_packages(lightning_tricks.__path__, "lightning_tricks."):
        if module.name.rpartition(".")[2] not in ("__main__", "_harness_model"):  # one needs lm_eval
            importlib.import_module(module.name)

    def below(cls: type) -> set[type]:
        return {each for child in cls.__subclasses__() for each in (child, *below(child))}

    return {cls for cls in below(Function) if cls.__module__.startswith("lightning_tricks.")}


def test_every_function_is_tried():
    assert functions() == set(CASES)


@pytest.fixture
def alone():
    """A process group of this process, to which rows may be sent."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("case", CASES.values(), ids=[cls.__name__ for cls in CASES])
def test_a_second_derivative_is_right_or_an_error(case):
    function, inputs, has_second = case
    if has_second:
        assert gradgradcheck(function, inputs)
        return
    with pytest.raises(UsageError, match=r"create_graph=True: .* has no second derivative"):
        grad(function(*inputs).sum(), inputs, create_graph=True)


def test_a_norm_of_any_size_has_the_second_derivative_of_torchs():
    norm, x = RMSNorm(64, 1e-5), numbers(OWN_NORM_FROM // 64, 64)

    def second(normed: Tensor) -> Tensor:
        (first,) = grad(normed.pow(3).sum(), x, create_graph=True)
        return grad(first.square().sum(), x)[0]

    expected = second(F.rms_norm(x, (64,), norm.weight, 1e-5))
    # sums of large terms: rounded as the largest is
    torch.testing.assert_close(second(norm(x)), expected, rtol=0, atol=2e-6 * float(expected.abs().max()))
