"""What the planted faults of `doctor_trials` look like beside a run without one, for the plots of docs/playbook.md.

python -m benchmarks.doctor_trials --keep LOGS --healthy 1
python -m benchmarks.playbook_curves LOGS
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.doctor_trials import FAULTS, Trial
from lightning_tricks.logs.page import thinned
from lightning_tricks.logs.run import find_run
from lightning_tricks.logs.run_log import RunLog, Series, read_log
from lightning_tricks.logs.symptoms import findings

HEALTHY = "healthy_0"
MOST_METRICS = 2  # in one picture
OTHERS = {"lr": ("attention_logits",)}  # symptoms of a fault that have a picture of their own, besides the first


def rounded(series: Series) -> dict[str, list[float]]:
    """Steps, and values of four digits, of the points that a plot shows."""
    points = thinned(series.finite())
    return {"steps": [int(step) for step in points.steps], "values": [float(f"{v:.4g}") for v in points.values]}


def pictures(trial: Trial, log: RunLog, healthy: RunLog) -> dict[str, dict[str, Any]]:
    """What the pictures of a fault show, by symptom: the finding, and its metrics in both runs."""
    found = [finding for finding in findings(log) if trial.note or finding.severity != "note"]
    shown = [found[0], *(finding for finding in found[1:] if finding.symptom in OTHERS.get(trial.name, ()))]
    result = {}
    for finding in shown:
        names = [name for name in finding.metrics if name in log.metrics][:MOST_METRICS]
        curves = {
            name: {"fault": rounded(log.metrics[name]), "healthy": rounded(healthy.metrics[name])}
            if name in healthy.metrics
            else {"fault": rounded(log.metrics[name])}
            for name in names
        }
        result[finding.symptom] = {"what": trial.what, "finding": asdict(finding), "curves": curves}
        if finding.symptom == "clip_pinned":
            result[finding.symptom]["level"] = log.setting("trainer.gradient_clip_val")
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; see --help."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", type=Path, help="folder that doctor_trials --keep has filled")
    parser.add_argument("--out", type=Path, help="JSON file; default benchmarks/results/playbook-DATE-cpu.json")
    options = parser.parse_args(arguments)
    out = options.out or Path(__file__).parent / "results" / f"playbook-{machine.today()}-cpu.json"
    healthy = read_log(find_run(options.logs / HEALTHY))[0]
    lines = []
    for trial in FAULTS:
        shown = pictures(trial, read_log(find_run(options.logs / trial.name))[0], healthy)
        lines += [f"{json.dumps(f'{trial.name}-{symptom}')}: {json.dumps(one)}" for symptom, one in shown.items()]
    described = json.dumps(machine.describe())
    joined = ",\n".join(lines)
    out.write_text(f'{{"benchmark": "playbook",\n"machine": {described},\n"pictures": {{\n{joined}\n}}}}\n', "utf-8")
    print(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
