"""Replace an attribute of an object that somebody else owns, for a limited time."""

from typing import Any

_MISSING = object()
_active: list["_Replacement"] = []  # every replacement that has not ended, the latest last


def replaced(owner: Any, name: str, value: Any) -> "_Replacement":
    """Set `owner.name` to `value` inside the `with`, and put back afterwards exactly what was there.

    An attribute that the object itself had, such as a user's own override, is set again; a name that came from the
    class is deleted from the object. Several replacements of one attribute may end in any order. One that somebody else
    has put over `value` by other means stays.

    Args:
        owner: an object or a Python module.
        name: of a method or another attribute.
        value: of the attribute inside the `with`; no `nn.Module`, which a module would keep among its submodules.
    """
    return _Replacement(owner, name, value)


class _Replacement:
    """The context manager of `replaced`; a class, as some are entered in each step."""

    __slots__ = ("_attributes", "before", "name", "owner", "value")

    def __init__(self, owner: Any, name: str, value: Any) -> None:
        self.owner, self.name, self.value = owner, name, value
        # not `setattr`: an nn.Module first looks among its parameters, buffers and submodules
        self._attributes: Any = type if isinstance(owner, type) else object
        self.before: Any = _MISSING

    def __enter__(self) -> None:
        self.before = vars(self.owner).get(self.name, _MISSING)
        self._attributes.__setattr__(self.owner, self.name, self.value)
        _active.append(self)

    def __exit__(self, *_: Any) -> None:
        _active.remove(self)
        for other in _active:
            if other.owner is self.owner and other.name == self.name and other.before is self.value:
                other.before = self.before
                return
        if vars(self.owner).get(self.name, _MISSING) is self.value:
            if self.before is _MISSING:
                self._attributes.__delattr__(self.owner, self.name)
            else:
                self._attributes.__setattr__(self.owner, self.name, self.before)
