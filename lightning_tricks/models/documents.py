"""Packed documents without a dense mask: which kernel attends within them, and what it needs to know of a batch."""

import inspect
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

# In tokens: here a call of torch's CPU kernel for each document takes 0.53 of the dense mask's time in fp32 and 1.06 in
# bf16 with 2 heads of 32, less with more heads or longer rows. Half the documents' length gives 0.48 and 1.54, half the
# rows' 0.76 and 2.22 (torch 2.13, `benchmarks/packed_documents.py`). One document a row pays as well.
BY_DOCUMENTS_FROM = 1024
MEAN_DOCUMENT_FROM = 64
# torch 2.12 has `window_size`, `scale` and `enable_gqa`; versions before may lack some of them.
_VARLEN_OPTIONS = frozenset(inspect.signature(varlen_attn).parameters)
_VARLEN_MAX_HEAD_DIM = 192  # flash's backward pass takes wider heads on some GPUs only


class Documents(NamedTuple):
    """Rows of packed documents, to attend in without a dense mask. One object serves all blocks.

    Args:
        ids: (batch, length) integers, equal for tokens of the same document.
        offsets: int32, ascending: where documents begin in the rows laid one after the other, and batch * length. A
            number may stand there more than once.
        lengths: of the documents, in tokens, where the CPU's kernel runs once for each; None: `varlen_attn` runs.
    """

    ids: Tensor
    offsets: Tensor
    lengths: tuple[int, ...] | None


Mask = Tensor | Documents


def fits_varlen(dtype: torch.dtype, head_dim: int) -> bool:
    """Whether torch's flash kernel for packed documents takes such queries."""
    fits = head_dim % 8 == 0 and head_dim <= _VARLEN_MAX_HEAD_DIM and {"window_size", "scale"} <= _VARLEN_OPTIONS
    return fits and dtype in (torch.bfloat16, torch.float16)


def varlen_serves(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether that kernel runs there: on CUDA from compute capability 8.0."""
    on_cuda = device.type == "cuda" and torch.version.hip is None
    return on_cuda and fits_varlen(dtype, head_dim) and torch.cuda.get_device_capability(device) >= (8, 0)


def packed_documents(ids: Tensor, starts: Tensor | None, dtype: torch.dtype, head_dim: int) -> Documents | None:
    """How to attend within documents without a mask; None where the mask is faster, or nothing else serves.

    On a CPU the kernel runs once a document where rows are long and documents are not short. On CUDA all sizes depend
    on the shapes alone, and nothing waits for the device; that needs `starts`.

    Args:
        ids: (batch, length) integers, equal for tokens of the same document, which lie side by side.
        starts: (batch, documents) int32, ascending: the position in the row at which each document begins, then
            `length` as padding. A CPU does not read them.
        dtype: of queries and keys.
        head_dim: width of a head.
    """
    rows, length = ids.shape
    if starts is not None and starts.shape[1] > 0 and varlen_serves(ids.device, dtype, head_dim):
        begins = (starts + length * torch.arange(rows, device=ids.device).unsqueeze(1)).flatten()
        return Documents(ids, F.pad(begins, (0, 1), value=rows * length).int(), None)
    if ids.device.type != "cpu" or length < BY_DOCUMENTS_FROM:
        return None
    begins = F.pad(ids[:, 1:] != ids[:, :-1], (1, 0), value=True).flatten().nonzero().flatten()
    offsets = F.pad(begins, (0, 1), value=rows * length).int()
    if len(begins) * MEAN_DOCUMENT_FROM > rows * length:
        return None
    return Documents(ids, offsets, tuple(offsets.diff().tolist()))


def varlen(q: Tensor, k: Tensor, v: Tensor, documents: Documents, length: int, scale: float | None) -> Tensor:
    """The result of torch's kernel, for tokens of all rows one after the other, (tokens, heads, head_dim)."""
    options: dict[str, Any] = {"window_size": (-1, 0), "scale": scale}
    if "enable_gqa" in _VARLEN_OPTIONS:
        options["enable_gqa"] = True
    else:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    # under autocast torch's norm leaves queries and keys in fp32 on CUDA, and this kernel casts nothing
    q, k, offsets = q.to(v.dtype), k.to(v.dtype), documents.offsets
    # the longest document is not known on the host: the row's length is as good
    out: Any = varlen_attn(q, k, v, offsets, offsets, length, length, **options)
    return out
