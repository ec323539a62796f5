"""The tables of docs/race.md, for `fill.py`."""

from typing import Any

from filler import Filler


def texts(result: dict[str, Any]) -> dict[str, str]:
    """Each table, and the machine."""
    from benchmarks import race_table

    runs, machine = result["runs"], result["machine"]
    hours = sum(run.get("seconds", 0) for run in runs) / 3600
    said = (
        f"\n\nMeasured from {machine['date'][:10]} on, on one core of a CPU ({machine['cpu']}), torch "
        f"{machine['versions']['torch']}: {hours:.1f} core hours for all runs of this page."
    )
    return {
        "race finals": race_table.finals_table(runs) + said,
        "race tricks": race_table.tricks_table(runs),
        "race tuning": race_table.tuning_table(runs),
        "race claims": race_table.claims_table(runs),
    }


FILLERS = {"race": Filler("race.md", texts)}
