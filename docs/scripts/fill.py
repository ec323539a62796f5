"""Write the tables and the plots of the pages from the newest results in benchmarks/results.

    python docs/scripts/fill.py                      # every page
    python docs/scripts/fill.py optimizers mup       # these
    python docs/scripts/fill.py --check              # write nothing; a page that is not what its results give is named

A text stands in a page between `<!-- NAME -->` and the next `<!-- end -->`.
"""

import argparse
import importlib
import json
import re
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

SCRIPTS = Path(__file__).resolve().parent
DOCS, ROOT = SCRIPTS.parents[0], SCRIPTS.parents[1]
RESULTS = ROOT / "benchmarks/results"
sys.path[:0] = [str(SCRIPTS), str(ROOT)]  # scripts beside this one; the benchmarks and the package of this checkout


class Filler(NamedTuple):
    """What fills places of a page.

    Args:
        page: in docs.
        texts: gives Markdown by the name of its place, from the result of a benchmark.
        draw: draws the plot, from the result, into `images/NAME.svg`.
        measured: whether there is a result to fill it from.
    """

    page: str
    texts: Callable[[Any], Mapping[str, str]]
    draw: Callable[[Any, Path], None] | None = None
    measured: bool = True


def checkpoints(result: dict[str, Any]) -> dict[str, str]:
    """What saves and loads cost."""
    from benchmarks.checkpoints import table

    described = result["machine"]
    packages = ", ".join(f"{name} {described['versions'][name]}" for name in ("torch", "lightning", "isal"))
    text = (
        f"{table(result)}\n\nTimes are in those of `torch.save` with fsync, or of `torch.load`, in the same round, "
        f"memory in sizes of the checkpoint: {result['parameters'] / 1e6:.0f}M parameters with AdamW's state, "
        f"{result['gib']:.2f} GiB. One thread, measured {described['date'][:10]} on a CPU with {described['cores']} "
        f"cores, load average {result['load_average'][0]:.1f} at the start: {packages}."
    )
    return {"checkpoints": text}


def kept_memory(result: dict[str, Any]) -> dict[str, str]:
    """What blocks and the loss keep."""
    from benchmarks.kept_memory import table

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
    return {"modes": table(result), "units": textwrap.fill(units, 120, break_on_hyphens=False)}


def decoder_parts(result: dict[str, Any]) -> dict[str, str]:
    """What was tried to make the decoder faster."""
    from benchmarks.decoder_parts import table

    described = result["machine"]
    said = (
        "CPU time of the new form over that of the old, forward and backward pass in fp32 on one thread; in brackets "
        f"the extremes over {result['rounds']} rounds. Measured {described['date'][:10]} by `python -m "
        f"benchmarks.decoder_parts` on a CPU with {described['cores']} cores ({described['cpu']}), load average "
        f"{result['load_average'][0]:.1f} at the end, torch {described['versions']['torch']}."
    )
    return {"parts": f"{table(result)}\n\n{textwrap.fill(said, 120, break_on_hyphens=False)}"}


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

    recipe = {name: "" if command.needs == "nothing" else "yes" for name, command in COMMANDS.items()}
    rows = [f"| `{name}` | {recipe[name]} | {command.help} |" for name, command in COMMANDS.items()]
    return {"commands": "\n".join(["| command | on a recipe | |", "|---|---|---|", *rows])}


def _of(script: str, function: str) -> Callable[..., Any]:
    """A function of a script beside this one, which is imported when it is called."""
    return lambda *args: getattr(importlib.import_module(script), function)(*args)


FILLERS = {  # by the name with which the files of the results begin
    "average": Filler("average.md", _of("fill_export", "average"), measured=False),
    "check": Filler("check.md", _of("fill_commands", "check"), measured=False),
    "checkpoints": Filler("checkpoints.md", checkpoints),
    "commands": Filler("command_line.md", commands, measured=False),
    "decoder-parts": Filler("speed.md", decoder_parts),
    "doctor-trials": Filler("doctor.md", _of("fill_commands", "doctor_trials")),
    "export": Filler("export.md", _of("fill_export", "families"), measured=False),
    "foreign": Filler("existing_projects.md", foreign),
    "kept-memory": Filler("decoder.md", kept_memory),
    "layers": Filler("parameter_roles.md", _of("fill_layers", "texts"), measured=False),
    "lightning-suite": Filler("existing_projects.md", lightning_suite),
    "muon-cost": Filler("muon.md", muon_cost),
    "mup-transfer": Filler("mup.md", _of("plot_mup", "texts"), _of("plot_mup", "draw")),
    "optimizers": Filler("optimizers.md", _of("fill_optimizers", "texts")),
    "peers": Filler("speed.md", _of("plot_peers", "texts"), _of("plot_peers", "draw")),
    "playbook": Filler("playbook.md", _of("plot_playbook", "texts"), _of("plot_playbook", "draw")),
    "precision": Filler("precision.md", _of("plot_precision", "texts"), _of("plot_precision", "draw")),
    "readme": Filler("../README.md", _of("fill_readme", "texts"), measured=False),
    "runs": Filler("runs.md", _of("fill_commands", "runs"), measured=False),
    "plan-foreign": Filler("plan.md", _of("fill_commands", "plan_foreign")),
    "plan-memory": Filler("plan.md", _of("fill_commands", "plan")),
    "plan-published": Filler("plan.md", _of("fill_commands", "plan_published")),
    "schedule": Filler(
        "schedule_command.md", _of("fill_commands", "schedule"), _of("fill_commands", "draw"), measured=False
    ),
    "sync-audit": Filler("sync_audit.md", _of("fill_commands", "sync_audit"), measured=False),
    "strategies": Filler("strategies.md", _of("fill_strategies", "texts")),
}


def newest(name: str) -> Path:
    """The file of the newest result of a benchmark on a CPU."""
    return max(RESULTS.glob(f"{name}-*-cpu.json"))


def result_of(name: str) -> Any:
    """The newest result of a filler, None for one that needs none."""
    return json.loads(newest(name).read_text(encoding="utf-8")) if FILLERS[name].measured else None


def between_markers(page: str, texts: Mapping[str, str]) -> str:
    """`page` with each text in its place.

    Raises:
        ValueError: the page has no such place.
    """
    for name, text in texts.items():
        place = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.S)
        page, found = place.subn(lambda match, text=text: f"{match[1]}{text}\n{match[2]}", page, count=1)
        if not found:
            raise ValueError(f"no place <!-- {name} -->")
    return page


def problems(name: str, page: str) -> list[str]:
    """What of a page is not as its results give it."""
    found = []
    for place, text in FILLERS[name].texts(result_of(name)).items():
        try:
            same = between_markers(page, {place: text}) == page
        except ValueError as error:
            found.append(str(error))
            continue
        if not same:
            found.append(f"<!-- {place} --> is another text: run python docs/scripts/fill.py {name}")
    if FILLERS[name].measured:
        named = set(re.findall(rf"{name}-[\d-]+-cpu\.json", page)) - {newest(name).name}
        found += [f"names {other}, and {newest(name).name} is newer" for other in sorted(named)]
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns 1 where a check finds a difference."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(FILLERS)}")
    parser.add_argument("--check", action="store_true", help="write nothing, and name the pages that would change")
    options = parser.parse_args(argv)
    if unknown := [name for name in options.names if name not in FILLERS]:
        parser.error(f"unknown name {unknown[0]}: give some of {', '.join(FILLERS)}")
    found = []
    for name in options.names or FILLERS:
        filler = FILLERS[name]
        path = DOCS / filler.page
        page = path.read_text(encoding="utf-8")
        if options.check:
            found += [f"docs/{filler.page}: {problem}" for problem in problems(name, page)]
            continue
        result = result_of(name)
        path.write_text(between_markers(page, filler.texts(result)), encoding="utf-8")
        if filler.draw is not None:
            filler.draw(result, DOCS / f"images/{path.stem}.svg")
    print("\n".join(found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
