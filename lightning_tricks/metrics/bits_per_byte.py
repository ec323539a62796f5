"""Bits per byte: how many bits the model needs for a byte of text, whatever its tokenizer."""

import math

from torch import Tensor

from lightning_tricks.metrics._ratio import SumRatio


class BitsPerByte(SumRatio):
    """Nats of all tokens over ln 2 times the bytes of text that they stand for, over all batches and all ranks.

    Comparable between models of different tokenizers, and with compressors: 8 is no model at all. Leave tokens out that
    stand for no text, such as end-of-text. Equal to sums in float64 to 1e-13; on Apple's GPUs right to 1e-6, also
    after a billion tokens. NaN without any byte.

    Example:
        >>> bits_per_byte = BitsPerByte()
        >>> bits_per_byte.update(nats=16 * math.log(2), n_bytes=8)
        >>> round(bits_per_byte.compute().item(), 9)
        2.0

    Source: `evaluate_bpb` in https://github.com/karpathy/nanochat/blob/master/nanochat/loss_eval.py.
    """

    def update(self, nats: Tensor | float, n_bytes: Tensor | int) -> None:
        """Add a batch.

        Args:
            nats: sum of the losses of its tokens; a scalar or one a row.
            n_bytes: UTF-8 bytes that those tokens stand for; a scalar or one a row.
        """
        self.add_batch(nats, n_bytes)

    def compute(self) -> Tensor:
        """Bits per byte, a scalar."""
        return self.ratio() / math.log(2)
