"""One product for several layers: their results and gradients, and nothing that hangs on a layer is passed over."""

import pytest
import torch
from models.decoders import CONFIGS, build, tokens
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_tricks.models.fused_linear import can_multiply_together, multiply
from lightning_tricks.parallel.activation_checkpointing import LINEAR_OPS

SIZES = {"q, k, v": (64, (64, 16, 16)), "gate, up": (48, (112, 112)), "odd": (33, (7, 5, 3))}


def results(call, x, layers, seeds):
    """Results, the gradient of `x`, and those of the parameters."""
    outputs = call(x, layers)
    parameters = [parameter for layer in layers for parameter in layer.parameters()]
    grad_x, *grads = torch.autograd.grad(outputs, [x, *parameters], seeds)
    return [*outputs], grad_x, grads


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("bias", "how"), [(False, "once"), (True, "once"), (True, "run again")])
def test_results_and_gradients_are_those_of_the_single_products_up_to_the_rounding_of_sums(size, dtype, bias, how):
    torch.manual_seed(0)
    width, outputs = SIZES[size]
    layers = [nn.Linear(width, out, bias=bias, dtype=dtype) for out in outputs]
    x = torch.randn(2, 24, width, dtype=dtype, requires_grad=True)
    seeds = [torch.randn(2, 24, out, dtype=dtype) for out in outputs]
    single = results(lambda x, layers: multiply(x, layers, None), x, layers, seeds)
    fused = results(lambda x, layers: multiply(x, layers, how), x, layers, seeds)
    half, unit = torch.finfo(dtype).eps / 2, torch.finfo(torch.float32).eps / 2

    def close(found, expected, magnitude, terms, roundings):
        """Two sums of the same terms in fp32, in any order, of which `roundings` parts were rounded to `dtype`."""
        bound = (2 * terms * unit + roundings * half) * magnitude
        assert ((found.double() - expected.double()).abs() <= bound).all()

    flat = x.detach().double().flatten(0, 1).abs()
    for layer, out, expected, seed in zip(layers, fused[0], single[0], seeds, strict=True):
        magnitude = flat @ layer.weight.double().abs().T + (layer.bias.double().abs() if bias else 0)
        close(out.flatten(0, 1), expected.flatten(0, 1), magnitude, width + 1, 2)
        assert out.shape == seed.shape
    parameters = [parameter for layer in layers for parameter in layer.parameters()]
    owners = [seed for seed in seeds for _ in range(1 + bias)]
    for found, expected, parameter, seed in zip(fused[2], single[2], parameters, owners, strict=True):
        sizes = seed.double().flatten(0, 1).abs()
        close(found, expected, sizes.sum(0) if parameter.ndim == 1 else sizes.T @ flat, 48, 2)
    # the one that is another sum: of all outputs at once, not of a rounded product for each layer, rounded as it grows
    pairs = zip(seeds, layers, strict=True)
    magnitude = sum(seed.double().flatten(0, 1).abs() @ layer.weight.double().abs() for seed, layer in pairs)
    close(fused[1].flatten(0, 1), single[1].flatten(0, 1), magnitude, sum(outputs) + len(layers), 2 * len(layers))


def pair():
    return [nn.Linear(8, 8), nn.Linear(8, 4)]


def changed(change):
    layers = pair()
    change(layers[1])
    return layers


class Wrapped(nn.Linear):
    """Of another library."""


def own_forward(layer):
    layer.forward = lambda x: nn.functional.linear(x, layer.weight) * 2


SINGLE = {
    "forward hook": lambda: changed(lambda layer: layer.register_forward_hook(lambda *_: None)),
    "hook before": lambda: changed(lambda layer: layer.register_forward_pre_hook(lambda *_: None)),
    "backward hook": lambda: changed(lambda layer: layer.register_full_backward_hook(lambda *_: None)),
    "hook before backward": lambda: changed(lambda layer: layer.register_full_backward_pre_hook(lambda *_: None)),
    "forward of the object": lambda: changed(own_forward),
    "parametrization": lambda: changed(parametrizations.weight_norm),
    "compiled": lambda: changed(lambda layer: layer.compile(backend="eager")),
    "one is frozen": lambda: changed(lambda layer: layer.requires_grad_(False)),
    "one has no bias": lambda: changed(lambda layer: layer.register_parameter("bias", None)),
    "a subclass": lambda: [Wrapped(8, 8), Wrapped(8, 4)],
    "a subclass at the end": lambda: [nn.Linear(8, 8), Wrapped(8, 4)],
}


@pytest.mark.parametrize("layers", SINGLE.values(), ids=SINGLE)
def test_layers_whose_calls_do_more_are_called_one_by_one(layers):
    assert can_multiply_together(pair())
    assert not can_multiply_together(layers())


def test_a_hook_on_a_layer_of_a_block_sees_each_call():
    decoder, seen = build(CONFIGS["llama"]), []
    decoder.fuse_projections()
    hook = decoder.blocks[0].attn.k.register_forward_hook(lambda layer, args, out: seen.append(out.shape))
    with Products() as counted:
        decoder.features(tokens(2, 24))
    assert seen == [(2, 24, 32)]
    assert counted.number == (4 + 2) + (2 + 2)
    hook.remove()
    with Products() as counted:
        decoder.features(tokens(2, 24))
    assert counted.number == 2 * 4


class Together(nn.Linear):
    """A class that multiplies with several of itself in its own way."""

    def multiply_together(self, x, layers):
        return tuple(layer(x) + 1 for layer in layers)


def test_a_class_may_bring_its_own_product():
    layers, x = [Together(8, 8), Together(8, 4)], torch.randn(3, 8)
    assert can_multiply_together(layers)
    for layer, out in zip(layers, multiply(x, layers, "once"), strict=True):
        assert torch.equal(out, layer(x) + 1)
    assert not can_multiply_together([layers[0], nn.Linear(8, 4)])


class Products(TorchDispatchMode):
    """Counts the products of linear layers."""

    number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += func in LINEAR_OPS
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("name", "single"), [("llama", 7), ("llama-all", 6), ("gpt2", 6), ("gpt2-gated", 7)])
def test_a_block_multiplies_four_times_in_training_and_trains_as_without(name, single):
    decoder, ids = build(CONFIGS[name]), tokens(2, 24)
    found, names = [], list(decoder.state_dict())
    for fused, number in ((False, single), (True, 4)):
        decoder.fuse_projections(fused)
        decoder.zero_grad()
        with Products() as counted:
            features = decoder.features(ids)
        assert counted.number == 2 * number
        features.square().sum().backward()
        gradients = {name: p.grad for name, p in decoder.named_parameters() if p.grad is not None}
        found.append((features.detach(), gradients))
    for name, gradient in found[0][1].items():  # that of a key's bias is zero but for rounding
        assert (found[1][1][name] - gradient).norm() <= 2e-6 * max(gradient.norm(), 100 * name.endswith("k.bias")), name
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-5, atol=1e-5)
    assert list(decoder.state_dict()) == names
    with torch.no_grad(), Products() as counted:
        decoder.features(ids)
    assert counted.number == 2 * single  # in a step of `generate` the copy would take longer than the product


@pytest.mark.parametrize("mixed", [False, True])
def test_no_copy_of_a_weight_waits_for_the_backward_pass(mixed):
    layers, x = [nn.Linear(64, 64) for _ in range(3)], torch.randn(2, 8, 64)
    x, kept = x.bfloat16() if mixed else x, {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), torch.autocast("cpu", enabled=mixed):
        multiply(x, layers, "once")
    own = {layer.weight.untyped_storage().data_ptr() for layer in layers}
    others = [tensor for key, tensor in kept.items() if key not in own | {x.untyped_storage().data_ptr()}]
    # FSDP2 frees its gathered weights, and could not free a copy; under autocast the casts are kept, as without
    assert sorted(map(tuple, (tensor.shape for tensor in others))) == ([(64, 64)] * 3 if mixed else [])


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_frozen_weights_or_biases_of_all_leave_the_others_their_gradients(frozen):
    layers, x, grads = pair(), torch.randn(3, 8, requires_grad=True), []
    for layer in layers:
        getattr(layer, frozen).requires_grad_(False)
    assert can_multiply_together(layers)
    trained = [parameter for layer in layers for parameter in layer.parameters() if parameter.requires_grad]
    for how in (None, "once"):
        out = torch.cat(multiply(x, layers, how), dim=-1)
        grads.append(torch.autograd.grad(out.square().sum(), [x, *trained]))
    torch.testing.assert_close(grads[1], grads[0])
