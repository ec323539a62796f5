"""The options that a monitor refuses when it is made, each in one line with its value and what to give."""

import math

import pytest

from lightning_tricks._core.errors import UsageError
from lightning_tricks.callbacks import (
    ActivationMonitor,
    DoctorMonitor,
    GradNormMonitor,
    MFUMonitor,
    RunLedger,
    UpdateMonitor,
)

REFUSED = [
    (ActivationMonitor, {"blocks": []}, r"ActivationMonitor.blocks=\[\]: give a list"),
    (ActivationMonitor, {"blocks": "model.embed"}, "ActivationMonitor.blocks='model.embed': give a list"),
    (DoctorMonitor, {"names": {"los": "a"}}, r"names: los=a; did you mean loss\?"),
    (GradNormMonitor, {"per": "layer"}, "per='layer': give one of block, group, or none"),
    (MFUMonitor, {"flops_per_token": 0.0}, "flops_per_token=0.0: give a positive number"),
    (MFUMonitor, {"flops_per_sample": -1.0}, "flops_per_sample=-1.0: give a positive number"),
    (MFUMonitor, {"peak_flops": math.inf}, "peak_flops=inf: give a positive number"),
    (MFUMonitor, {"peak_flops": math.nan}, "peak_flops=nan: give a positive number"),
    (MFUMonitor, {"flops_per_token": 1.0, "flops_per_sample": 2.0}, "flops_per_sample=2.0: leave it out"),
    (MFUMonitor, {"attention": "half"}, "attention='half': give one of causal, full"),
    (RunLedger, {"cover_weights_in_steps": 0}, "RunLedger.cover_weights_in_steps=0: give 1 or more"),
    (UpdateMonitor, {"max_elements": 0}, "UpdateMonitor.max_elements=0: give 1 or more, or null for all"),
]


@pytest.mark.parametrize(("monitor", "options", "words"), REFUSED, ids=str)
def test_an_option_that_would_give_a_wrong_figure_is_refused(monitor, options, words):
    with pytest.raises(UsageError, match=words):
        monitor(**options)
