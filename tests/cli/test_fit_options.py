"""What the options of a fit say before it starts, from the settings alone."""

import pytest

from lightning_tricks.cli.fit_options import no_validation_line


@pytest.mark.parametrize(
    ("trainer", "done", "due"),
    [
        ({"max_steps": 10, "val_check_interval": 10}, 0, True),
        ({"max_steps": 10, "val_check_interval": 11}, 0, False),
        ({"max_steps": 10, "val_check_interval": 11, "accumulate_grad_batches": 2}, 0, True),
        ({"max_steps": 10, "val_check_interval": 1.0}, 0, True),  # at the end of the data
        ({"max_steps": 10, "val_check_interval": 11, "limit_val_batches": 0}, 0, True),  # none is wanted
        ({"max_steps": -1, "val_check_interval": 1000}, 0, True),  # the length is not known
        ({"max_steps": 19, "val_check_interval": 10}, 10, False),  # a branch from step 10 to step 19
        ({"max_steps": 20, "val_check_interval": 10}, 10, True),
    ],
)
def test_a_fit_without_a_validation_says_so(trainer, done, due):
    line = no_validation_line({"trainer": trainer}, done)
    assert (line is None) == due
    assert due or f"val_check_interval={trainer['val_check_interval']}: no validation is due in the" in line
