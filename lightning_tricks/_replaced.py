"""Replace an attribute of an object that somebody else owns, for a limited time."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

_MISSING = object()
_standing: list[SimpleNamespace] = []  # every replacement that has not ended, the latest last


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set `owner.name` to `value` inside the `with`, and put back afterwards exactly what was there.

    An attribute that the object itself had, such as a user's own override, is set again; a name that came from the
    class is deleted from the object. Several replacements of one attribute may end in any order. One that somebody else
    has put over `value` by other means stays.

    Args:
        owner: an object or a Python module.
        name: of a method or another attribute.
        value: of the attribute inside the `with`; no `nn.Module`, which a module would keep among its submodules.
    """
    own = SimpleNamespace(owner=owner, name=name, value=value, before=vars(owner).get(name, _MISSING))
    setattr(owner, name, value)
    _standing.append(own)
    try:
        yield
    finally:
        _standing[:] = [other for other in _standing if other is not own]
        above = [other for other in _standing if other.owner is owner and other.name == name and other.before is value]
        if above:
            above[0].before = own.before
        elif vars(owner).get(name, _MISSING) is value:
            if own.before is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, own.before)
