"""The rank that the others wait for, from the places of all ranks."""

from collections.abc import Mapping, Sequence

from lightning_tricks.guards.hang_watchdog.place import ENDED, FAILED, Place


def verdict(places: Mapping[int, Place], silent: Mapping[int, Place | None], world: int) -> str:
    """One line: which rank is behind, and where it is.

    Args:
        places: of the ranks that have answered.
        silent: ranks that have not, with the last place that they had told, if any.
        world: number of ranks.
    """
    failed = [place for place in places.values() if place.part == FAILED]
    if failed:
        return "; ".join(f"{place.name} has left its run after step {place.step}: {place.detail}" for place in failed)
    if silent:
        return "; ".join(_silent(rank, place, world) for rank, place in sorted(silent.items()))
    ended = [place for place in places.values() if place.part == ENDED]
    if ended and len(ended) < len(places):
        return f"{_names(ended)} {_is(ended)} {ended[0].text()}: the others have more steps or batches"
    ranks = list(places.values())
    return uneven_validation(ranks) or _behind(ranks)


def uneven_validation(places: Sequence[Place]) -> str:
    """The line on a validation that some ranks have ended, of which others run a later batch; empty where not so."""
    most = max(place.validations for place in places)
    done = [place for place in places if place.validations == most]
    inside = [place for place in places if place.evaluating and place.validations < most]
    longer = [place for place in inside if place.validation_batches > done[0].validation_batches]
    if not longer:
        return ""
    return (
        f"uneven validation: {_names(done)} had {done[0].validation_batches} batches, {_names(longer)} "
        f"{_is(longer)} at batch {longer[0].validation_batches}: give every rank the same number, such as by "
        "Trainer.limit_val_batches"
    )


def _behind(places: Sequence[Place]) -> str:
    last = _last(places)
    if len(last) < len(places):
        where = f"{last[0].text()}: {last[0].detail}" if last[0].detail else last[0].text()
        return f"{_names(last)} {_is(last)} behind: {where}"
    return f"no rank is behind the others: {places[0].text()}" if len(places) > 1 else ""


def _last(places: Sequence[Place]) -> Sequence[Place]:
    """The ranks that have begun the fewest collectives; where that is equal, by their places; by their stacks."""
    if all(place.collectives is not None for place in places):
        fewest = min(place.collectives for place in places)  # type: ignore[type-var]
        last = [place for place in places if place.collectives == fewest]
        if len(last) < len(places):
            return last
    first = min(place.order for place in places)
    last = [place for place in places if place.order == first]
    if len(last) < len(places):
        return last
    return [place for place in places if not place.in_collective] or places


def _silent(rank: int, place: Place | None, world: int) -> str:
    seen = f", last seen {place.text()}" if place else ""
    name = place.name if place else f"rank {rank} of {world}"
    return f"{name} gives no sign of life{seen}: stopped, gone, or in C code that holds Python's lock"


def _names(places: Sequence[Place]) -> str:
    if len(places) == 1:
        return places[0].name
    return f"ranks {', '.join(str(place.rank) for place in places[:8])}{', ...' if len(places) > 8 else ''}"


def _is(places: Sequence[Place]) -> str:
    return "is" if len(places) == 1 else "are"
