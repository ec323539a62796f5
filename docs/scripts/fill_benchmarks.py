"""Tables that a benchmark's own module makes, for `fill.py`."""

import textwrap
from typing import Any

from filler import Filler


def checkpoints(result: dict[str, Any]) -> dict[str, str]:
    """What saves and loads cost."""
    from benchmarks.checkpoints import table

    described = result["machine"]
    packages = ", ".join(f"{name} {described['versions'][name]}" for name in ("torch", "lightning"))
    text = (
        f"{table(result)}\n\nTimes are in those of `torch.save` with fsync, or of `torch.load`, in the same round, "
        f"memory in sizes of the checkpoint: {result['parameters'] / 1e6:.0f}M parameters with AdamW's state, "
        f"{result['gib']:.2f} GiB. One thread, measured {described['date'][:10]} on a CPU with {described['cores']} "
        f"cores, load average {result['load_average'][0]:.1f} at the start: {packages}."
    )
    return {"checkpoints": text}


def first_saves(result: dict[str, Any]) -> dict[str, str]:
    """How long training waits for the first saves in the background."""
    from benchmarks.first_saves import table

    described, rounds = result["machine"], len(result["stalls"]["reserved"])
    said = (
        f"Medians of {rounds} rounds, {result['parameters'] / 1e6:.0f}M parameters with AdamW's state, one thread. "
        f"Measured {described['date'][:10]} by `python -m benchmarks.first_saves` on a CPU with "
        f"{described['cores']} cores, load average {result['load_average'][0]:.1f}."
    )
    return {"first saves": f"{table(result)}\n\n{textwrap.fill(said, 120, break_on_hyphens=False)}"}


def kept_memory(result: dict[str, Any]) -> dict[str, str]:
    """What blocks and the loss keep."""
    from benchmarks.kept_memory import budget_table, table

    rows, loss = result["blocks"], result["loss"]
    cheap = [row for row in rows if row["mode"] == "cheap" and row["compiled"]]
    taken = {form: f"{size / 2**30:.2f}" for form, size in loss["bytes"].items()}
    units = (
        "A unit is one d_model wide row of 16 bits a token and layer. The figures are of `Llama` with d_model 512, "
        f"d_ff 1536 and {result['length']:,} tokens, weights and products in bf16; with fp32 weights under autocast "
        f"`cheap` keeps {cheap[0]['float32']:.1f}, as the residual stream is wider. At the proportions of Llama-2-7B "
        f"(d_ff 2.69 d_model) it keeps {cheap[1]['bfloat16']:.1f} in bf16. Head and loss at a vocabulary of "
        f"{loss['vocabulary']:,} and {loss['tokens']:,} tokens take {taken['slices']} GiB beyond gradients, and "
        f"{taken['plain']} GiB where all logits exist. Measured {result['machine']['date'][:10]} by "
        "`python -m benchmarks.kept_memory`, on a CPU."
    )
    return {
        "modes": table(result),
        "units": textwrap.fill(units, 120, break_on_hyphens=False),
        "budgets": budget_table(result),
    }


def _measured(result: dict[str, Any], benchmark: str) -> str:
    """When, how and where."""
    machine = result["machine"]
    return (
        f"Measured {machine['date'][:10]} by `python -m benchmarks.{benchmark}` on a CPU with {machine['cores']} cores "
        f"({machine['cpu']}), load average {result['load_average'][0]:.1f} at the end, torch "
        f"{machine['versions']['torch']}."
    )


def _with_table(table: str, said: str) -> str:
    return f"{table}\n\n{textwrap.fill(said, 120, break_on_hyphens=False)}"


def decoder_parts(result: dict[str, Any]) -> dict[str, str]:
    """What was tried to make the decoder faster."""
    from benchmarks.decoder_parts import table

    said = (
        "CPU time of the new form over that of the old, forward and backward pass in fp32 on one thread; in brackets "
        f"the extremes over {result['rounds']} rounds. {_measured(result, 'decoder_parts')}"
    )
    return {"parts": _with_table(table(result), said)}


def packed_documents(result: dict[str, Any]) -> dict[str, str]:
    """Attention within documents."""
    from benchmarks.packed_documents import table

    said = (
        "CPU time of attention over that with a dense mask, forward and backward pass on one thread; in brackets the "
        f"extremes over {result['rounds']} rounds. {_measured(result, 'packed_documents')}"
    )
    return {"packed documents": _with_table(table(result), said)}


def cold_starts(result: dict[str, Any]) -> dict[str, str]:
    """Starts with and without a cache of compiled code."""
    from benchmarks.cold_starts import table

    said = (
        "From the command to the end of a process of one training step on one thread, beside other programs, which "
        "shows in seconds more than in CPU seconds; in brackets the extremes over the rounds. "
        f"{_measured(result, 'cold_starts')}"
    )
    return {"cold starts": _with_table(table(result), said)}


def muon_cost(result: dict[str, Any]) -> dict[str, str]:
    """A step of Muon."""
    from benchmarks.muon_cost import table

    described = result["machine"]
    said = (
        "CPU time of a whole step, and over that of its products alone in the same type: the median, in brackets the "
        f"extremes of {result['rounds']} rounds. One thread, measured {described['date'][:10]} by `python -m "
        f"benchmarks.muon_cost` on a CPU with {described['cores']} cores ({described['cpu']}), load average "
        f"{result['load_average'][0]:.1f}, torch {described['versions']['torch']}."
    )
    return {"cost": f"{table(result)}\n\n{textwrap.fill(said, 120, break_on_hyphens=False)}"}


def foreign(result: dict[str, Any]) -> dict[str, str]:
    """Models that are not ours."""
    from benchmarks.foreign import table

    versions = result["machine"]["versions"]
    packages = ", ".join(f"{name} {versions[name]}" for name in sorted(versions))
    return {"foreign": f"{table(result['rows'])}\n\nMeasured {result['machine']['date'][:10]} on a CPU: {packages}."}


def lightning_suite(result: dict[str, Any]) -> dict[str, str]:
    """Lightning's own tests."""
    from benchmarks.lightning_suite import page_text

    return {"lightning": page_text(result)}


def commands(_: Any) -> dict[str, str]:
    """The commands, as their registry has them."""
    from lightning_tricks.commands import COMMANDS

    recipe = {name: "" if command.needs in ("nothing", "the parser") else "yes" for name, command in COMMANDS.items()}
    rows = [f"| `{name}` | {recipe[name]} | {command.help} |" for name, command in COMMANDS.items()]
    return {"commands": "\n".join(["| command | on a recipe | |", "|---|---|---|", *rows])}


FILLERS = {
    "checkpoints": Filler("checkpoints.md", checkpoints),
    "cold-starts": Filler("speed.md", cold_starts),
    "commands": Filler("command_line.md", commands, measured=False),
    "decoder-parts": Filler("speed.md", decoder_parts),
    "first-saves": Filler("checkpoints.md", first_saves),
    "foreign": Filler("compatibility.md", foreign),
    "kept-memory": Filler("decoder.md", kept_memory),
    "lightning-suite": Filler("compatibility.md", lightning_suite),
    "muon-cost": Filler("muon.md", muon_cost),
    "packed-documents": Filler("speed.md", packed_documents),
}
