"""A plan in words: the verdict, one table of figures, one of memory, what to change."""

from collections.abc import Iterator

from lightning_tricks.commands.plan.memory_trace import LINES
from lightning_tricks.commands.plan.plan import MemoryPlan
from lightning_tricks.logs.table import size_text
from lightning_tricks.monitors.goodput_monitor import duration

_LEAST = 1e-3  # share of the peak below which a line is not shown
_BAR = 36  # columns of the largest peak


def report(plan: MemoryPlan) -> str:
    """The lines of a plan."""
    lines = [*_verdict(plan), "", *_model(plan), "", *_memory(plan), "", *_time(plan)]
    if plan.budgets:
        lines += ["", *_budgets(plan)]
    if plan.whole.traffic:
        lines += ["", *_traffic(plan)]
    if plan.warnings:
        lines += ["", "Warnings", *(f"  {line}" for line in plan.warnings)]
    return "\n".join(lines)


def _row(name: str, text: str) -> str:
    return f"  {name:<20}{text}"


def _verdict(plan: MemoryPlan) -> Iterator[str]:
    peak, room, count = plan.peak_bytes, plan.device.bytes, f"{plan.setup.world:,} x " if plan.setup.on_gpu else ""
    yield "Verdict"
    if peak is None:
        yield _row("memory", f"not known: {plan.why_no_memory}")
    elif plan.fits:
        yield _row("memory", f"fits: {size_text(peak)} of {size_text(room)}, {peak / room:.0%}")
    else:
        yield _row("memory", f"DOES NOT FIT: {size_text(peak)} of {size_text(room)}, {size_text(peak - room)} too much")
    for number, change in enumerate(plan.changes):
        yield _row("to make it fit" if number == 0 else "or", " ".join(change.options))
        yield _row("", f"{size_text(change.peak + plan.device.overhead)}; {change.why}")
    if plan.fits is False and not plan.changes:
        yield _row("to make it fit", "no single change of this recipe does: take a smaller model, or more memory")
    if best := plan.largest_budget:
        size, again = size_text(best.peak_bytes + plan.device.overhead), best.recomputed_fraction
        fits = f"{{budget: {best.budget:g}}} fits: {size}, {again:.1%} of the FLOPs computed again"
        yield _row("largest budget", f"activation_checkpointing: {fits}")
    if plan.hours is None:
        yield _row("time", "not known, as the tokens or the speed of the run are not")
    else:
        yield _row("time", f"{duration(3600 * plan.hours)} on {count}{plan.device.name}, at an MFU of {plan.mfu:.0%}")
    if plan.gpu_hours is not None and plan.setup.on_gpu:
        cost = "; --price, of one, gives the cost" if plan.cost is None else f" at {plan.price:g}: {plan.cost:,.2f}"
        yield _row("cost", f"{plan.gpu_hours:,.2f} device hours{cost}")


def _model(plan: MemoryPlan) -> Iterator[str]:
    total = sum(plan.parameters.values())
    roles = sorted(plan.parameters.items(), key=lambda entry: -entry[1])
    yield "Model"
    yield _row("parameters", f"{total:,}: {', '.join(f'{role} {count:,}' for role, count in roles)}")
    if frozen := plan.parameters.get("frozen", 0):
        yield _row("trained", f"{total - frozen:,} of them")
    if plan.active is not None:
        yield _row("multiplied with", f"{plan.active:,} of them by each token")
    if plan.tokens_a_step is not None:
        setup = plan.setup
        product = f"{setup.rows} rows x {setup.length} tokens x {setup.dims.data_ranks} data ranks"
        yield _row("a step", f"{plan.tokens_a_step:,} tokens: {product} x {setup.micro_batches} micro-batches")
    if plan.tokens is not None:
        yield _row("the run", f"{plan.tokens:,} tokens, {plan.tokens / total:.3g} a parameter")


def _memory(plan: MemoryPlan) -> Iterator[str]:
    setup, device = plan.setup, plan.device
    mesh = f", {setup.dims}" if setup.kind == "fsdp2" else "" if setup.world == 1 else f", {setup.kind}"
    yield f"Memory of {device.name}, {size_text(device.bytes)} ({setup.nodes} x {setup.devices} devices{mesh})"
    if plan.memory is None:
        yield _row("weights", size_text(plan.whole.weights))
        return
    lines = plan.memory.instants[plan.memory.largest]
    yield _row("peak", plan.memory.largest)
    top = max(lines, key=lambda line: lines[line])
    for line in LINES:
        if lines.get(line, 0) > _LEAST * plan.memory.peak:
            yield _row(f"  {line}", f"{size_text(lines[line])}{'  <- most' if line == top else ''}")
    if device.overhead:
        yield _row("  the device's own", f"{size_text(device.overhead)}, assumed: CUDA, cuBLAS, NCCL")
    others = {name: sum(of.values()) for name, of in plan.memory.instants.items() if name != plan.memory.largest}
    for number, (name, size) in enumerate(others.items()):
        yield _row("other phases" if number == 0 else "", f"{size_text(size)}  {name}")
    if plan.memory.ranks:
        sizes = ", ".join(f"{name} {size_text(size + device.overhead)}" for name, size in plan.memory.ranks.items())
        yield _row("pipeline ranks", f"{sizes}; the largest is shown above")
    if plan.memory.host:
        parts = ", ".join(f"{line} {size_text(size)}" for line, size in plan.memory.host.items())
        yield _row("host memory", f"{size_text(plan.host_bytes)} for {setup.devices} processes, each: {parts}")
    for note in plan.memory.notes:
        yield _row("note", note)


def _budgets(plan: MemoryPlan) -> Iterator[str]:
    yield "Budgets of activation checkpointing: peak, and FLOPs computed again; | is the device's memory"
    scale = _BAR / (plan.budgets[0].peak_bytes + plan.device.overhead)
    mark = round(scale * plan.device.bytes)
    for one in plan.budgets[::10]:
        size = one.peak_bytes + plan.device.overhead
        bar = "#" * round(scale * size)
        bar = f"{bar[:mark]:<{mark}}|{bar[mark + 1 :]}" if mark < _BAR else bar
        yield _row(f"{one.budget:g}", f"{size_text(size):>11}  {one.recomputed_fraction:6.1%}  {bar}")


def _time(plan: MemoryPlan) -> Iterator[str]:
    yield f"Time, at a stated MFU of {plan.mfu:.0%}"
    if plan.flops_per_token is None:
        yield _row("not known", "the FLOPs of this module: a run with MFUMonitor counts them")
        return
    all_trained = ", as if nothing were frozen" if plan.parameters.get("frozen") else ""
    flops = f"{plan.flops_per_token / 1e9:,.4g} G a token, full attention, nothing computed twice{all_trained}"
    yield _row("FLOPs", flops)
    if plan.device.peak is None:
        yield _row("not known", f"the peak of {plan.device.name} at {plan.setup.peak_dtype}: give --peak_tflops")
        return
    rate = plan.tokens_per_second or 0.0
    each = f", {rate / plan.setup.world:,.0f} a device" if plan.setup.world > 1 else ""
    origin = plan.device.source or ("given" if plan.setup.on_gpu else "measured here")
    yield _row("peak", f"{plan.device.peak / 1e12:,.4g} TFLOP/s at {plan.setup.peak_dtype} ({origin})")
    yield _row("tokens/s", f"{rate:,.0f}{each}")


def _traffic(plan: MemoryPlan) -> Iterator[str]:
    setup, times = plan.setup, plan.step_time()
    yield "Sent in a step, and how long it takes at 80 % of the links' figures"
    for one in plan.whole.traffic:
        where = "between hosts" if plan.links.is_on_network(setup.dims, one.axis) else "in a host"
        link = f"{where}, {plan.links.speed(setup.dims, one.axis):g} GB/s"
        name = "expert shards" if one.axis == "rest" else one.axis
        if not one.bytes(1):
            yield _row(name, f"{one.ranks} ranks, {link}: not counted")
            continue
        size = one.bytes(setup.tokens) * setup.micro_batches
        seconds = f"{times.sends[one.axis]:,.3g} s" if times else ""
        yield _row(name, f"{one.ranks} ranks, {link}: {size_text(size)} a device, {seconds}")
    if times:
        if plan.whole.waits:
            yield _row("pipeline", f"ranks wait {plan.whole.waits:.0%} of the time, which is in the computation below")
        yield _row("computation", f"{times.compute:,.3g} s; estimated step {times.total:,.3g} s")
