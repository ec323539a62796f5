"""Find the output head of any model, by its methods, names or order: optimizers of hidden matrices must not get it."""

import re
from collections.abc import Iterator

from torch import nn
from torch.nn import Parameter

from lightning_tricks._find_modules import clean_name

# `lm_head`, `heads.head` (torchvision), `head.fc` (timm), `embed_out` (GPT-NeoX), `score` (a classifier on a decoder)
_HEAD = re.compile(r"((lm|mlm|cls|seg|out|output|pred\w*)_)?heads?|unembed\w*|embed_out|score|output_projection|logits")
_METHODS = ("get_output_embeddings", "get_classifier")  # of transformers and timm


def head_weights(module: nn.Module) -> list[Parameter]:
    """The matrices that turn hidden states into the outputs of a model, tied ones included.

    The first of these three ways that finds a matrix decides:

    - what a method `get_output_embeddings()` (transformers) or `get_classifier()` (timm) of a module returns;
    - matrices with such a name: `lm_head`, `head`, `heads.head`, `head.fc`, `unembed`, `embed_out`, `score`, `logits`,
      but not inside a block that is repeated, whose heads are those of attention;
    - the last matrix, if it is an `nn.Linear` in no repeated block: `fc` of a ResNet, the end of an `nn.Sequential`.
    """
    by_method = [matrix for child in module.modules() for matrix in _returned(child)]
    if by_method:
        return by_method
    matrices = [(clean_name(name), param) for name, param in module.named_parameters() if param.ndim >= 2]
    by_name = [
        param for name, param in matrices if not _in_block(name) and any(map(_HEAD.fullmatch, name.split(".")[:-1]))
    ]
    if by_name or len(matrices) < 2:
        return by_name
    linear = {id(child.weight) for child in module.modules() if isinstance(child, nn.Linear)}
    last_name, last = matrices[-1]
    return [last] if id(last) in linear and not _in_block(last_name) else []


def _returned(module: nn.Module) -> Iterator[Parameter]:
    for method in _METHODS:
        if callable(found := getattr(module, method, None)):
            try:
                head = found()
            except (AttributeError, NotImplementedError, TypeError):  # no head, or a method of another kind
                continue
            if isinstance(head, nn.Module):
                yield from (param for param in head.parameters() if param.ndim >= 2)


def _in_block(name: str) -> bool:
    """Whether a parameter lies in a member of a list of modules, deeper than at its top: `blocks.0.mlp.up.weight`."""
    return any(part.isdigit() for part in name.split(".")[:-2])
