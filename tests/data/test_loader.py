"""A loader's batches do not depend on its workers, also where the run's end moves while they fetch ahead."""

import numpy as np
import pytest

from lightning_tricks.data.batches import TrainBatches
from lightning_tricks.data.loader import IdGuard, Loader
from lightning_tricks.data.order import WindowOrder
from lightning_tricks.data.positions import Positions
from lightning_tricks.data.stream import TokenStream


@pytest.mark.parametrize("end_later", [10, 5, 2])  # the first is beyond all that workers have fetched by then
def test_the_batches_are_the_same_for_any_number_of_workers_where_the_end_moves(write_shard, end_later):
    stream = TokenStream([write_shard(np.arange(200))])
    batches = TrainBatches(stream, WindowOrder(len(stream), 8, 0), 1, None)
    rows = []
    for num_workers in (0, 2):
        end, served = 4, []
        loader = Loader(batches, lambda: Positions(lambda: range(2, 2 + end)), num_workers, IdGuard())  # noqa: B023
        for batch in loader:
            served.append(batch["input_ids"].tolist())
            if len(served) == 2:
                end = end_later
        rows.append(served)
    assert rows[0] == rows[1] == [batches[2 + n]["input_ids"].tolist() for n in range(end_later)]
