"""A command loads the part of torchmetrics that Lightning needs; who asks for more gets all of it, unchanged."""

import subprocess

from harness.preloaded import python

LOAD = "import sys; from lightning_tricks._torchmetrics_on_demand import load_on_demand; load_on_demand()\n"
HEAVY = "scipy matplotlib transformers torchmetrics.functional torchmetrics.classification"
# torch, and the libraries that the whole package imports, once for all tests that import it
LIBRARIES = ("torch", "matplotlib.pyplot", "transformers")


def lines(code: str, *imported: str) -> list[str]:
    """What a new process prints, in which some modules are imported."""
    done = subprocess.run([python(*imported), "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()


def test_a_command_loads_no_metric_and_none_of_the_libraries_of_metrics_and_a_metric_of_ones_own_still_draws():
    code = f"""
import sys
sys.argv = ["lightning-tricks", "plan", "--help"]
from lightning_tricks.__main__ import main
try:
    main()
except SystemExit:
    print([n for n in "{HEAVY}".split() if n in sys.modules])
import torch
from torchmetrics import Metric
class Sum(Metric):
    def __init__(self):
        super().__init__()
        self.add_state("n", torch.ones(()), "sum")
    def update(self): ...
    def compute(self): return self.n
one = Sum()
one.update()
try:
    print(type(one._plot()[0]).__name__)
except ModuleNotFoundError as error:  # torchmetrics' own
    print("matplotlib" in str(error) and "Figure")
"""
    assert lines(code, "torch")[-2:] == ["[]", "Figure"]


def test_who_imports_another_part_has_the_whole_package_with_the_same_classes():
    code = f"""{LOAD}
from torchmetrics import Metric, __version__
from torchmetrics.functional.classification import accuracy
import types, torchmetrics
import torchmetrics.functional as part
from torchmetrics.utilities import plot
print(type(torchmetrics) is types.ModuleType, set(torchmetrics.__all__) <= set(vars(torchmetrics)))
print(torchmetrics.Metric is Metric, issubclass(torchmetrics.MeanMetric, Metric))
print(part is torchmetrics.functional, part.__spec__.name, type(part.__spec__.loader).__name__)
print(hasattr(plot, "plot_confusion_matrix"), [one for one in sys.meta_path if "torchmetrics" in repr(one)])
"""
    assert lines(code, *LIBRARIES) == [
        "True True",
        "True True",
        "True torchmetrics.functional SourceFileLoader",
        "True []",
    ]


def test_a_package_of_other_files_is_imported_as_ever():
    code = """
import sys
from lightning_tricks import _torchmetrics_on_demand as on_demand
on_demand._CLASSES["Metric"] = "no_such_file"
on_demand.load_on_demand()
print("torchmetrics" in sys.modules, [one for one in sys.meta_path if "torchmetrics" in repr(one)])
import torchmetrics
print(torchmetrics.Metric.__name__, torchmetrics.Accuracy.__name__)
"""
    assert lines(code, *LIBRARIES) == ["False []", "Metric Accuracy"]


def test_who_asks_for_a_name_has_the_whole_package_and_an_unknown_one_is_an_attribute_error():
    code = f"""{LOAD}
import torchmetrics
print(hasattr(torchmetrics, "__wrapped__"), "torchmetrics.functional" in sys.modules)
try:
    torchmetrics.no_such_metric
except AttributeError as error:
    print(error)
load_on_demand()
print(torchmetrics is sys.modules["torchmetrics"], torchmetrics.Accuracy.__name__)
"""
    unknown = "module 'torchmetrics' has no attribute 'no_such_metric'"
    assert lines(code, *LIBRARIES) == ["False False", unknown, "True Accuracy"]
