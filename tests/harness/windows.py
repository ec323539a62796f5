"""Rows of one stream for tests: where they start, and their batches."""

from lightning_tricks.data.batches import TrainBatches, WindowRows
from lightning_tricks.data.order import RowOrder, windows


class WindowOrder:
    """The starts of one stream's windows."""

    def __init__(self, tokens, seq_len, seed):
        self.windows, self.order = windows(tokens, seq_len, seed).rows, RowOrder([windows(tokens, seq_len, seed)])

    def starts(self, positions):
        source, starts = self.order.places(positions)
        assert not source.any()
        return starts


def train_batches(stream, tokens, seq_len, micro_batch_size, eot_id=None):
    order = RowOrder([windows(tokens, seq_len, 0)])
    return TrainBatches([WindowRows(stream, eot_id)], order, seq_len, micro_batch_size, eot_id is not None)
