"""A cache of keys and values: the next token costs the decoder one position in place of the whole row."""

import torch
from torch import Tensor


class LayerCache:
    """Keys and values of one block; the first `append` allocates the memory for `max_length` tokens."""

    def __init__(self, max_length: int) -> None:
        self.max_length, self.length = max_length, 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add keys and values, (batch, kv_heads, new, head_dim); return those of all tokens so far, as views."""
        if self._keys is None or self._values is None:
            shape = (*k.shape[:2], self.max_length, k.shape[3])
            self._keys, self._values = torch.empty(shape, dtype=k.dtype, device=k.device), v.new_empty(shape)
        begin, self.length = self.length, self.length + k.shape[2]
        self._keys[:, :, begin : self.length] = k
        self._values[:, :, begin : self.length] = v
        return self._keys[:, :, : self.length], self._values[:, :, : self.length]


class KVCache:
    """The caches of all blocks; `Decoder.forward(..., cache=cache)` reads them and adds the new tokens.

    Args:
        n_layers: number of blocks.
        max_length: tokens of a row, prompt and continuation together. Memory: 2 * n_layers * batch * kv_heads *
            max_length * head_dim numbers.
    """

    def __init__(self, n_layers: int, max_length: int) -> None:
        self.layers = [LayerCache(max_length) for _ in range(n_layers)]

    @property
    def length(self) -> int:
        """Number of tokens that the decoder has read."""
        return self.layers[0].length
