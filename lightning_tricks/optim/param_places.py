"""Where each parameter of a model lies: in which layer, under which name, also through wrappers and parametrizations.

A computed weight is never read: `layer.weight` of a parametrized layer computes it, and spectral normalization changes
its state in doing so. Everything here looks into `_parameters` and `_modules` only.
"""

from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

from torch import nn
from torch.nn import Parameter
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList

from lightning_tricks._find_modules import clean_name


class Place(NamedTuple):
    """A parameter in the layer that uses it.

    Args:
        name: of the parameter, without wrappers' prefixes.
        param: the parameter.
        path: of the layer that computes with it. Of a parametrization, the layer whose weight it makes.
        layer: that layer, without wrappers.
        local: the name of the weight there: `weight` also of `parametrizations.weight.original`, `weight_v` and
            `weight_orig`.
        is_scale: whether it only scales the rows of a weight, as `weight_g` of a weight norm.
    """

    name: str
    param: Parameter
    path: str
    layer: nn.Module
    local: str
    is_scale: bool = False

    @property
    def parts(self) -> list[str]:
        """The names on the way from the model to the weight."""
        return [*filter(None, self.path.split(".")), self.local]


class Model:
    """The modules of a model by name without wrappers' prefixes, and the places of its parameters."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        # of a wrapper and the module in it, which have one name, the inner one comes last
        self.layers = {clean_name(path + ".").rstrip("."): layer for path, layer in module.named_modules()}

    @cached_property
    def places(self) -> list[Place]:
        """Every parameter in every layer that holds it: a tied one comes several times."""
        return [place for path, owner in self.module.named_modules() for place in self._places(path, owner)]

    def _places(self, path: str, owner: nn.Module) -> Iterator[Place]:
        path = clean_name(path + ".").rstrip(".")
        own = {name: param for name, param in owner._parameters.items() if param is not None}
        for name, param in own.items():
            full = f"{path}.{name}" if path else name
            if isinstance(owner, ParametrizationList):
                layer, _, tensor = path.rpartition(".")
                layer = layer.removesuffix("parametrizations").rstrip(".")
                yield Place(full, param, layer, self.layers[layer], tensor, name != _direction(own))
            else:
                local, is_scale = _before_hooks(name, owner)
                yield Place(full, param, path, owner, local, is_scale)

    @cached_property
    def matrices(self) -> list[tuple[str, Parameter]]:
        """The parameters of at least two dimensions, each once, by the names of the weights that they make."""
        found: dict[int, tuple[str, Parameter]] = {}
        for place in self.places:
            if not is_lazy(place.param) and place.param.ndim >= 2 and not place.is_scale:
                found.setdefault(id(place.param), (".".join(place.parts), place.param))
        return list(found.values())

    def below(self, path: str) -> Iterator[tuple[str, Parameter]]:
        """The parameters at or below the module called `path`, by their names as seen from it.

        That of a parametrization has two: `fc.parametrizations.weight.original`, and `fc.weight`.
        """
        prefix = f"{path}." if path else ""
        for place in self.places:
            for name in dict.fromkeys((place.name, ".".join(filter(None, (place.path, place.local))))):
                if name.startswith(prefix):
                    yield name[len(prefix) :], place.param

    def parameter(self, path: str, name: str) -> Parameter | None:
        """The parameter `name` as seen from the module called `path`; None where there is none."""
        above, _, local = name.rpartition(".")
        layer = self.layers.get(f"{path}.{above}".strip("."))
        return None if layer is None else weight_of(layer, local)

    @cached_property
    def _inside(self) -> dict[str, dict[str, nn.Module]]:
        found: dict[str, dict[str, nn.Module]] = {path: {} for path in self.layers}
        for path, layer in self.layers.items():
            if path:
                found[path.rpartition(".")[0]][path] = layer
        return found

    def inside(self, path: str) -> dict[str, nn.Module]:
        """The modules right inside the one called `path`, by their whole names and without wrappers."""
        return self._inside[path]


def _direction(originals: dict[str, Parameter]) -> str:
    """The original of a parametrization that is as large as the weight; of a weight norm, the last of them."""
    return max(originals, key=lambda name: (originals[name].numel(), name))


def _before_hooks(name: str, owner: nn.Module) -> tuple[str, bool]:
    """The name of a weight that a hook computes (torch's older weight norm, spectral norm, pruning), and whether the
    parameter is its scale.
    """
    base, _, suffix = name.rpartition("_")
    parameters = dict(owner._parameters.items())
    if base and parameters.get(base) is None:
        if suffix in ("g", "v") and {f"{base}_g", f"{base}_v"} <= parameters.keys():
            return base, suffix == "g"
        if suffix == "orig":
            return base, False
    return name, False


def weight_of(layer: nn.Module, name: str = "weight") -> Parameter | None:
    """The parameter behind `layer.weight`, without computing the weight; None where there is none."""
    if name in layer._parameters and (param := layer._parameters[name]) is not None:  # a ScriptModule's has no `get`
        return param
    if isinstance(originals := getattr(layer, "parametrizations", None), nn.ModuleDict):
        own = originals._modules.get(name)
        found = {key: param for key, param in own._parameters.items() if param is not None} if own is not None else {}
        return found[_direction(found)] if found else None
    return next(
        (layer._parameters[other] for other in (f"{name}_v", f"{name}_orig") if other in layer._parameters), None
    )
