"""Load of torchmetrics what Lightning needs, and the rest when it is asked for: a command starts 2 CPU seconds earlier.

`import torchmetrics` loads all of its metrics, and with them scipy, matplotlib and transformers where these are
installed. Lightning needs two of its classes. Whoever asks for more gets the whole package, loaded as ever.
"""

import importlib
import importlib.util
import logging
import sys
import threading
from collections.abc import Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_NAME = "torchmetrics"
_CLASSES = {"Metric": "metric", "MetricCollection": "collections"}  # that Lightning imports, and their files
_ALONE = {"__about__", "metric", "collections", "utilities"}  # what loads without the rest of the package
_PLOT = f"{_NAME}.utilities.plot"


def load_on_demand() -> None:
    """Have the next `import torchmetrics` load little; without effect where it has been imported already.

    For a program of its own, before it imports Lightning. A torchmetrics whose files are others than known here is
    imported as ever.
    """
    if _NAME in sys.modules or (spec := importlib.util.find_spec(_NAME)) is None:
        return
    module = importlib.util.module_from_spec(spec)
    module.__class__ = _Partial
    module._logger = logging.getLogger(_NAME)  # type: ignore[attr-defined]  # which its utilities take from it
    sys.modules[_NAME] = module
    sys.meta_path.insert(0, _OTHER_PARTS)
    sys.modules[_PLOT] = _Plot(_PLOT)
    try:
        about = importlib.import_module(f"{_NAME}.__about__")
        vars(module).update({name: vars(about)[name] for name in about.__all__})
        for name in _CLASSES:
            getattr(module, name)
    except Exception:
        if _OTHER_PARTS in sys.meta_path:
            sys.meta_path.remove(_OTHER_PARTS)
        for name in [name for name in sys.modules if name.partition(".")[0] == _NAME]:
            del sys.modules[name]


_lock = threading.RLock()


class _Partial(ModuleType):
    """torchmetrics before its own code has run."""

    def __getattr__(self, name: str) -> Any:
        if name in _CLASSES:
            importlib.import_module(f"{_NAME}.utilities")  # the order of torchmetrics itself; these import each other
            return getattr(importlib.import_module(f"{_NAME}.{_CLASSES[name]}"), name)
        if name.startswith("__") and name != "__all__":  # of those who look at each module that is loaded
            raise AttributeError(name)
        load_all()
        try:
            return vars(self)[name]
        except KeyError:
            raise AttributeError(f"module {_NAME!r} has no attribute {name!r}") from None


def load_all() -> None:
    """Load the rest of the package into the module that is there."""
    with _lock:
        if _OTHER_PARTS not in sys.meta_path:
            return  # done, or under way in this thread
        sys.meta_path.remove(_OTHER_PARTS)
        sys.modules.pop(_PLOT, None)
        module = sys.modules[_NAME]
        assert module.__spec__ is not None
        assert module.__spec__.loader is not None
        module.__spec__.loader.exec_module(module)
        module.__class__ = ModuleType


class _Plot(ModuleType):
    """Stands for the part that draws: it would load matplotlib, and is what all metrics import."""

    _AX_TYPE = _PLOT_OUT_TYPE = object  # annotations, as torchmetrics has them without matplotlib

    @staticmethod
    def plot_single_or_multi_val(*args: Any, **kwargs: Any) -> Any:
        load_all()
        return importlib.import_module(_PLOT).plot_single_or_multi_val(*args, **kwargs)


class _OtherParts:
    """Of the import system: who imports another part gets the whole package first, whose parts need an order."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        first, _, rest = name.partition(".")
        if first != _NAME or rest.partition(".")[0] in _ALONE:
            return None
        load_all()
        return None if name not in sys.modules else ModuleSpec(name, _Loaded(sys.modules[name]))


class _Loaded(Loader):
    """Gives a module that is there, as it is."""

    def __init__(self, module: ModuleType) -> None:
        self.module, self.spec = module, module.__spec__

    def create_module(self, _: ModuleSpec) -> ModuleType:
        return self.module

    def exec_module(self, _: ModuleType) -> None:
        self.module.__spec__ = self.spec


_OTHER_PARTS: Any = _OtherParts()
