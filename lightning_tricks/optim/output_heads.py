"""Find the output head of any model, by its methods, names or order: hidden matrices are trained and cast otherwise."""

import re
from collections.abc import Iterator

from torch import nn
from torch.nn import Parameter

from lightning_tricks.optim.param_places import Model, weight_of

# `lm_head`, `heads.head` (torchvision), `head.fc` (timm), `embed_out` (GPT-NeoX), `score` (a classifier on a decoder)
_HEAD = re.compile(
    r"((lm|mlm|cls|seg|out|output|pred\w*|v|value|reward)_)?heads?|unembed\w*|embed_out|score|output_projection|logits"
)
_METHODS = ("get_output_embeddings", "get_classifier")  # of transformers and timm


def head_weights(model: Model) -> list[Parameter]:
    """The matrices that turn hidden states into the outputs of a model, tied ones included.

    - What a method `get_output_embeddings()` (transformers) or `get_classifier()` (timm) of a module returns; outside
      of this module, matrices with such a name: `lm_head`, `head`, `heads.head`, `head.fc`, `unembed`, `score`,
      `logits`, `v_head`, but not inside a block that is repeated, whose heads are those of attention.
    - If there is none: the one linear layer in no repeated block that has the shape of the largest embedding, with more
      rows than columns.
    - If there is none: the last matrix, if it is an `nn.Linear` in no repeated block: `fc` of a ResNet, the end of an
      `nn.Sequential`. A model of several towers (CLIP) has as many, if they have the same number of outputs.
    - In addition, each linear layer beside one of these that takes the same inputs, and whose outputs no layer beside
      it takes: `value` beside `lm_head`.
    """
    found = [*_by_method_and_name(model)] or _by_vocabulary(model) or _last(model)
    known = {id(param) for param in found}
    return found + [param for param in _beside(model, known) if id(param) not in known]


def _by_method_and_name(model: Model) -> Iterator[Parameter]:
    answered: list[str] = []
    for path, child in model.layers.items():
        if head := _returned(child):
            yield from head
            answered.append(f"{path}." if path else "")
    for name, param in model.matrices:
        is_head = not _in_block(name) and any(map(_HEAD.fullmatch, name.split(".")[:-1]))
        if is_head and not name.startswith(tuple(answered)):
            yield param


def _returned(module: nn.Module) -> list[Parameter]:
    for method in _METHODS:
        if callable(found := getattr(module, method, None)):
            try:
                head = found()
            except (AttributeError, NotImplementedError, TypeError):  # no head, or a method of another kind
                continue
            if isinstance(head, nn.Module):
                return [param for param in head.parameters() if param.ndim >= 2]
    return []


def _linear(model: Model) -> dict[str, Parameter]:
    """The weights of all `nn.Linear` by the names of the layers; a computed weight is not read."""
    layers = ((path, layer) for path, layer in model.layers.items() if isinstance(layer, nn.Linear))
    found = ((path, weight_of(layer)) for path, layer in layers)
    return {path: weight for path, weight in found if weight is not None}


def _by_vocabulary(model: Model) -> list[Parameter]:
    tables = [layer for layer in model.layers.values() if isinstance(layer, nn.Embedding)]
    largest = max(((table.num_embeddings, table.embedding_dim) for table in tables), default=(0, 0))
    if largest[0] <= largest[1]:
        return []
    linear = ((path, weight) for path, weight in _linear(model).items() if not _in_block(f"{path}.weight"))
    found = [weight for _, weight in linear if tuple(weight.shape) == largest]
    return found if len(found) == 1 else []


def _last(model: Model) -> list[Parameter]:
    paths = {id(weight): path for path, weight in _linear(model).items()}
    names, matrices = zip(*model.matrices, strict=True) if model.matrices else ((), ())
    if len(matrices) < 2 or id(matrices[-1]) not in paths or _in_block(names[-1]):
        return []
    last = matrices[-1]
    above = paths[id(last)].rpartition(".")[0]
    towers = {name.removeprefix(f"{above}.").split(".")[0] for name in names if _in_block(name)}
    found = [last]
    for param in matrices[-2 : -1 - len(towers) : -1]:
        path = paths.get(id(param))
        if path is None or path.rpartition(".")[0] != above or param.shape[0] != last.shape[0]:
            break
        found.append(param)
    return found


def _beside(model: Model, heads: set[int]) -> Iterator[Parameter]:
    """The linear layers next to a head which take the same inputs, and whose outputs no layer beside it takes."""
    linear = _linear(model)
    for above, layer in model.layers.items():
        if isinstance(layer, nn.Sequential | nn.ModuleList) or _in_block(f"{above}.any.weight"):
            continue
        inside = model.inside(above).items()
        near = [linear.get(path) for path, part in inside if next(part.parameters(), None) is not None]
        taken = {weight.shape[1] for weight in near if weight is not None}
        for order in (near, near[::-1]):
            inputs = None  # of the head before this layer
            for weight in order:
                if weight is not None and id(weight) in heads:
                    inputs = weight.shape[1]
                elif weight is None or weight.shape[1] != inputs or weight.shape[0] in taken:
                    inputs = None
                else:
                    yield weight


def _in_block(name: str) -> bool:
    """Whether a parameter lies in a member of a list of modules, deeper than at its top: `blocks.0.mlp.up.weight`."""
    return any(part.isdigit() for part in name.split(".")[:-2])
