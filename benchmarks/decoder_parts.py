"""What was tried to make parts of the decoder faster on a CPU: each beside the form that it would replace.

    python -m benchmarks.decoder_parts                # 4 minutes on a quiet machine
    python -m benchmarks.decoder_parts norm head      # some of them

Forward and backward pass in fp32 at the sizes `5M` and `30M` of `benchmarks.peers`, one thread, CPU time. Both forms
take turns, and a ratio is taken within a round; below 1, what was tried is faster. `kept` says whether the library has
it.
"""

import argparse
import functools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch looks

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import machine
from benchmarks.data_speed import in_turns, ratio
from benchmarks.peers import SIZES, llama
from lightning_tricks.models.attention import RMSNorm, RotaryPositions, rotate
from lightning_tricks.models.decoder import Block
from lightning_tricks.models.linear_cross_entropy import linear_cross_entropy

REPOSITORY = Path(__file__).resolve().parents[1]
CALLS = 4  # in a round
Act = Callable[[], Any]


class Trial(NamedTuple):
    """Two forms of one part.

    Args:
        before: makes a call of the old form, or of what the decoder has.
        tried: of the other.
        kept: whether the decoder has the other.
    """

    what: str
    before: Act
    tried: Act
    kept: bool


def gradients(function: Callable[..., Any], *inputs: Tensor) -> Act:
    """A call that runs the function, which returns one tensor or some, and its backward pass to all inputs."""
    out = function(*inputs)
    grads = [torch.randn_like(each) for each in (out if isinstance(out, tuple) else (out,))]
    return lambda: torch.autograd.grad(function(*inputs), inputs, grads)


def later(make: Callable[[], Act]) -> Act:
    """A call that is made when it is first needed: to compile takes long."""
    once = functools.cache(make)
    return lambda: once()()


def drawn(*shape: int) -> Tensor:
    """Normal numbers that want a gradient."""
    return torch.randn(shape, requires_grad=True)


class _Turned(torch.autograd.Function):
    """`rotate` by halves, in place of a rolled copy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turned(grad, cos, sin, -1), None, None


def _turned(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    half, out = x.shape[-1] // 2, x * cos
    out[..., :half].addcmul_(x[..., half:], sin[..., :half], value=sign)
    out[..., half:].addcmul_(x[..., :half], sin[..., half:], value=sign)
    return out


class _AttentionInBlocks(torch.autograd.Function):
    """torch's kernel forward; backward by products, for some queries at a time and the keys that they see."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, block: int) -> Tensor:
        out, log_sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
        ctx.save_for_backward(q, k, v, out, log_sums)
        ctx.block = block
        result: Tensor = out
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        shape, (length, width) = ctx.saved_tensors[0].shape, ctx.saved_tensors[0].shape[2:]
        q, k, v, out, grad = (part.reshape(-1, length, width) for part in (*ctx.saved_tensors[:4], grad))
        log_sums, along = ctx.saved_tensors[4].reshape(-1, length, 1), (grad * out).sum(-1, keepdim=True)
        to_q, to_k, to_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for begin in range(0, length, ctx.block):
            end = min(begin + ctx.block, length)
            own = slice(begin, end)
            weights = torch.baddbmm(log_sums[:, own], q[:, own], k[:, :end].mT, beta=-1, alpha=width**-0.5).exp_()
            weights[:, :, own].tril_()
            to_v[:, :end].baddbmm_(weights.mT, grad[:, own])
            scores = torch.baddbmm(along[:, own], grad[:, own], v[:, :end].mT, beta=-1).mul_(weights)
            to_q[:, own] = scores @ k[:, :end]
            to_k[:, :end].baddbmm_(scores.mT, q[:, own])
        return to_q.mul_(width**-0.5).view(shape), to_k.mul_(width**-0.5).view(shape), to_v.view(shape), None


def _attention_by_products(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    bias = torch.full((q.shape[2], q.shape[2]), float("-inf")).triu(1)
    scores = torch.baddbmm(bias, q.flatten(0, 1), k.flatten(0, 1).mT, alpha=q.shape[-1] ** -0.5)
    return (scores.softmax(-1) @ v.flatten(0, 1)).view_as(q)


class _SwiGLU(torch.autograd.Function):
    """Keeps its two inputs, and computes their product again."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grad * up, gate), F.silu(gate).mul_(grad)


def trials(size_name: str) -> Iterator[tuple[str, Trial]]:
    """Each with a short name, at one size."""
    size = SIZES[size_name]
    shape, rows, length = llama(size), size.rows, size.length
    width, heads, hidden, vocabulary = shape.d_model, shape.n_heads, shape.ffn_width, shape.vocab_size
    x = drawn(rows, length, width)

    norm = RMSNorm(width, 1e-5)
    torchs = lambda x, weight: F.rms_norm(x, (width,), weight, 1e-5)  # noqa: E731
    ours = lambda x, _: norm(x)  # noqa: E731
    yield (
        "norm",
        Trial(
            "RMSNorm with a backward pass of its own",
            gradients(torchs, x, norm.weight),
            gradients(ours, x, norm.weight),
            True,
        ),
    )

    flat, head, labels = (
        drawn(rows * length, width),
        drawn(vocabulary, width),
        torch.randint(vocabulary, (rows * length,)),
    )
    some = flat.detach()[:256]
    logits, sums = torch.randn(len(some), vocabulary), torch.zeros(vocabulary, width)
    yield (
        "head_gradient",
        Trial(
            "the head's weight gradient added by its product (one slice)",
            lambda: sums.add_(logits.T @ some),
            lambda: torch.addmm(sums, logits.T, some, out=sums),
            True,
        ),
    )
    sliced = lambda flat, head: linear_cross_entropy(flat, head, labels)  # noqa: E731
    yield (
        "head",
        Trial(
            "head and loss in slices of 256 tokens",
            gradients(lambda flat, head: F.cross_entropy(F.linear(flat, head), labels, reduction="sum"), flat, head),
            gradients(sliced, flat, head),
            True,
        ),
    )
    longer = lambda flat, head: linear_cross_entropy(flat, head, labels, rows=512)  # noqa: E731
    yield (
        "head_512",
        Trial("the same in slices of 512", gradients(sliced, flat, head), gradients(longer, flat, head), False),
    )

    def fused_swiglu(x: Tensor, weight: Tensor) -> Tensor:
        gate, up = F.linear(x, weight).chunk(2, -1)
        return F.silu(gate) * up

    q, k, v, gate, up = (drawn(n, width) for n in (width, width, width, hidden, hidden))
    yield (
        "fused_qkv",
        Trial(
            "one matrix for q, k and v",
            gradients(lambda x, *w: tuple(F.linear(x, each) for each in w), x, q, k, v),
            gradients(F.linear, x, drawn(3 * width, width)),
            False,
        ),
    )
    yield (
        "fused_gate_up",
        Trial(
            "one matrix for gate and up",
            gradients(lambda x, a, b: F.silu(F.linear(x, a)) * F.linear(x, b), x, gate, up),
            gradients(fused_swiglu, x, drawn(2 * hidden, width)),
            False,
        ),
    )

    def block(fused: bool, compiled: bool) -> Act:
        made = Block(shape)
        made.fused = fused
        if compiled:
            made.compile()
        tables = RotaryPositions(width // heads, length, 1e4)(length, torch.float32)
        return gradients(lambda x, *_: made(x, tables, None), x, *made.parameters())

    for how, compiled in (("eager", False), ("compiled", True)):
        single, fused = (later(functools.partial(block, each, compiled)) for each in (False, True))
        yield f"fused_block_{how}", Trial(f"a block with `fused_projections`, {how}", single, fused, True)
    a, b = drawn(rows, length, hidden), drawn(rows, length, hidden)
    yield (
        "swiglu",
        Trial(
            "silu(gate) * up with a backward pass of its own",
            gradients(lambda a, b: F.silu(a) * b, a, b),
            gradients(_SwiGLU.apply, a, b),
            False,
        ),
    )

    cos, sin = (table.detach() for table in RotaryPositions(width // heads, length, 1e4)(length, torch.float32))
    as_heads = lambda x: x.view(rows, length, heads, -1).transpose(1, 2)  # noqa: E731
    yield (
        "rotation",
        Trial(
            "rotation by halves, without a rolled copy",
            gradients(lambda x: rotate(as_heads(x), cos, sin), x),
            gradients(lambda x: _Turned.apply(as_heads(x), cos, sin), x),
            False,
        ),
    )
    parts = [drawn(rows, heads, length, width // heads) for _ in "qkv"]
    kernel = gradients(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), *parts)
    for queries in (64, 128):
        in_blocks = lambda *qkv, queries=queries: _AttentionInBlocks.apply(*qkv, queries)  # noqa: E731
        label = f"attention's backward pass in blocks of {queries} queries"
        yield f"attention_{queries}", Trial(label, kernel, gradients(in_blocks, *parts), False)
    yield "attention_products", Trial("attention by products", kernel, gradients(_attention_by_products, *parts), False)


def measure(size_name: str, names: Sequence[str], rounds: int) -> dict[str, Any]:
    """Milliseconds and ratios by name."""
    torch.manual_seed(0)
    found = {}
    for name, trial in trials(size_name):
        if names and name not in names:
            continue

        def some(act: Act) -> Act:
            return lambda: [act() for _ in range(CALLS)]

        times = in_turns({"before": some(trial.before), "tried": some(trial.tried)}, rounds)
        cpu = {key: round(1000 * sorted(t for t, _ in values)[rounds // 2] / CALLS, 2) for key, values in times.items()}
        found[name] = {"what": trial.what, "kept": trial.kept, "cpu_ms": cpu, "ratio": ratio(times, "tried", "before")}
        print(size_name, name, json.dumps(found[name]), flush=True)
    return found


def table(result: dict[str, Any]) -> str:
    """All sizes as Markdown: the median of the ratios, and in brackets the extremes over the rounds."""
    sizes = list(result["sizes"])
    lines = [f"| tried | {' | '.join(sizes)} | kept |", f"|---|{'--:|' * len(sizes)}---|"]
    for name, row in result["sizes"][sizes[0]].items():
        ratios = [result["sizes"][size][name]["ratio"] for size in sizes]
        cells = " | ".join("{median:.2f} ({min:.2f} to {max:.2f})".format(**each) for each in ratios)
        lines.append(f"| {row['what']} | {cells} | {'yes' if row['kept'] else 'no'} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line; see --help."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="of the parts; default all")
    parser.add_argument("--sizes", default="5M,30M", help="default %(default)s")
    parser.add_argument("--rounds", type=int, default=15, help="default %(default)s")
    parser.add_argument("--out", type=Path, help="default benchmarks/results/decoder-parts-DATE-cpu.json")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    found = {size: measure(size, options.names, options.rounds) for size in options.sizes.split(",")}
    result = {
        "benchmark": "decoder_parts", "machine": machine.describe(), "threads": 1, "rounds": options.rounds,
        "load_average": os.getloadavg(), "sizes": found,
    }  # fmt: skip
    out = options.out or REPOSITORY / f"benchmarks/results/decoder-parts-{machine.today()}-cpu.json"
    out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"\n{table(result)}\n\n{out}")


if __name__ == "__main__":
    main()
