"""The one clip: torch's arithmetic, the norm from before it, and plain and sharded gradients at once."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_tricks._core.errors import UsageError
from lightning_tricks.optim import clip, clip_grad_norm, clip_grad_value, grad_norms_of


def parameters(*grads):
    made = []
    for grad in grads:
        grad = torch.as_tensor(grad)
        made.append(torch.nn.Parameter(torch.zeros_like(grad)))
        made[-1].grad = grad.clone()
    return made


def grads(params):
    return [parameter.grad for parameter in params]


def test_the_norm_is_that_of_the_joined_vector_before_the_clip():
    params = parameters([3.0], [[0.0, 4.0]])
    norm = clip_grad_norm(params, 1.0)
    assert norm.item() == 5.0
    assert norm.shape == ()
    assert torch.cat([grad.flatten() for grad in grads(params)]).tolist() == pytest.approx([0.6, 0, 0.8], rel=1e-6)


def test_without_a_limit_it_only_measures():
    params = parameters([3e6], [4e6])
    assert clip_grad_norm(params, None).item() == 5e6
    assert torch.cat(grads(params)).tolist() == [3e6, 4e6]


@settings(max_examples=30)
@given(
    st.lists(st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=5), min_size=1, max_size=4),
    st.floats(0.01, 50),
)
def test_it_is_torchs_clip_bit_for_bit(values, limit):
    ours, theirs = parameters(*values), parameters(*values)
    assert torch.equal(clip_grad_norm(ours, limit), torch.nn.utils.clip_grad_norm_(theirs, limit))
    assert all(torch.equal(a, b) for a, b in zip(grads(ours), grads(theirs), strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_norm_of_gradients_of_half_precision_is_not_rounded(dtype):
    """1025 ones have the norm 32.0156: bf16 knows 32 and 32.25, fp16 32 and 32.03. Rounded, both would be another."""
    ones, more = torch.ones(1025, dtype=dtype), torch.ones(1, dtype=torch.float32)
    params = parameters(ones, more)
    for norm in (clip_grad_norm(params[:1], None), grad_norms_of([params[:1]])[0]):
        assert norm.dtype == torch.float32
        assert norm.item() == pytest.approx(1025**0.5, rel=1e-6)
    assert clip_grad_norm(params, 1026**0.5 / 2).item() == pytest.approx(1026**0.5, rel=1e-6)
    assert [grad.dtype for grad in grads(params)] == [dtype, torch.float32]
    assert grads(params)[0].tolist() == pytest.approx([0.5] * 1025, rel=1e-6)


def test_parameters_without_a_gradient_count_for_nothing_and_an_iterator_will_do():
    params = [*parameters([3.0], [4.0]), torch.nn.Parameter(torch.ones(2))]
    assert clip_grad_norm(iter(params), 1.0).item() == 5.0
    assert params[-1].grad is None


def test_no_gradients_have_the_norm_0():
    assert clip_grad_norm([torch.nn.Parameter(torch.ones(2))], 1.0).item() == 0
    assert clip_grad_norm([], 1.0).item() == 0


def test_the_norm_stays_on_the_gradients_device_without_being_read():
    param = torch.nn.Parameter(torch.zeros(3, device="meta"))
    param.grad = torch.ones(3, device="meta")  # reading a value of a meta tensor would raise
    assert clip_grad_norm([param], 1.0).device.type == "meta"


def test_sharded_and_plain_gradients_are_clipped_by_one_norm(tmp_path):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    one, two = init_device_mesh("cpu", (1,)), init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    plain = parameters([2.0])
    sharded = []
    for value, mesh in (([4.0, 0.0], one), ([[4.0]], two["tp"])):
        sharded.append(torch.nn.Parameter(distribute_tensor(torch.zeros_like(torch.tensor(value)), mesh, [Shard(0)])))
        sharded[-1].grad = distribute_tensor(torch.tensor(value), mesh, [Shard(0)])
    norm = clip_grad_norm([*plain, *sharded], 3.0)
    assert type(norm) is torch.Tensor
    assert norm.item() == 6.0
    clipped = [plain[0].grad, *(param.grad.full_tensor().flatten() for param in sharded)]
    assert torch.cat(clipped).tolist() == pytest.approx([1, 2, 0, 2], rel=1e-6)


@pytest.mark.parametrize("order", [1, -1])
def test_complex_gradients_count_by_their_absolute_values_and_are_not_clipped_by_value(order):
    params = [torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64)), *parameters([12.0])][::order]
    (numbers,) = [param for param in params if param.is_complex()]
    numbers.grad = torch.tensor([3 + 4j, 0])
    assert grad_norms_of([[param] for param in params]).tolist() == [5.0, 12.0][::order]
    assert clip_grad_norm(params, 6.5).item() == 13.0
    torch.testing.assert_close(numbers.grad, torch.tensor([1.5 + 2j, 0]))
    with pytest.raises(UsageError, match="gradient_clip_algorithm='value': a gradient is complex"):
        clip_grad_value(params, 1.0)


def test_parts_have_their_own_norms_and_one_without_gradients_has_none():
    three, four, twelve = parameters([3.0], [[4.0]], [12.0])
    bare = torch.nn.Parameter(torch.ones(2))
    norms = grad_norms_of([[three, four], [bare], [twelve, bare]])
    assert norms.tolist() == [5.0, 0.0, 12.0]
    assert norms.dtype == torch.float32
    assert grad_norms_of([[bare], []]).tolist() == [0.0, 0.0]


def sparse():
    table = torch.nn.Embedding(3, 2, sparse=True)
    table(torch.tensor([0])).sum().backward()
    return [table.weight]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        *(
            (lambda bad=bad: clip_grad_norm(parameters([1.0]), bad), f"gradient_clip_val={bad}")
            for bad in (0, math.nan)
        ),
        (lambda: clip_grad_value(parameters([1.0]), -1.0), "gradient_clip_val=-1.0"),
        (lambda: clip_grad_norm(sparse(), 1.0), "a gradient is sparse, .*: set sparse=False"),
        (lambda: clip_grad_value(sparse(), 1.0), "a gradient is sparse"),
        (lambda: grad_norms_of([sparse()]), "a gradient is sparse"),
    ],
)
def test_what_cannot_be_clipped_is_refused(call, words):
    with pytest.raises(UsageError, match=words):
        call()


def test_the_norm_of_half_shards_is_in_fp32_where_torch_takes_the_dtype_for_a_dimension(monkeypatch):
    """torch 2.14.1, `_foreach_norm(..., dtype=...)` of DTensors: TypeError: '>=' not supported."""
    gradients = [torch.full((3000,), 0.01, dtype=torch.bfloat16), torch.ones(4, 4, dtype=torch.float16)]
    expected = clip._norms(gradients)
    monkeypatch.setattr(clip, "_DTYPE_IS_TAKEN_FOR_DIM", True)
    monkeypatch.setattr(torch, "_foreach_norm", None)
    for gradient in gradients:
        gradient.device_mesh = "of a DTensor"
    torch.testing.assert_close(clip._norms(gradients), expected)
    assert expected.dtype == torch.float32
