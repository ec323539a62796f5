"""All symptoms, in the order in which findings of one score stand: causes before their consequences. No torch."""

from collections.abc import Callable, Iterator

from lightning_tricks.logs.run_log import RunLog
from lightning_tricks.logs.symptoms import loss_symptoms, other_symptoms
from lightning_tricks.logs.symptoms.finding import Finding

SYMPTOMS: tuple[Callable[[RunLog], Iterator[Finding]], ...] = (
    other_symptoms.printed,
    other_symptoms.scaler,
    loss_symptoms.not_finite,
    loss_symptoms.restore,
    loss_symptoms.divergence,
    loss_symptoms.stalled_at_peak,
    loss_symptoms.plateau,
    loss_symptoms.overfitting,
    loss_symptoms.validation_leak,
    other_symptoms.clip,
    loss_symptoms.spikes,
    other_symptoms.guarded_steps,
    other_symptoms.dead_units,
    other_symptoms.attention_logits,
    other_symptoms.throughput,
    other_symptoms.loader_stalls,
    other_symptoms.slow_rank,
    other_symptoms.never_decayed,
    other_symptoms.low_mfu,
)


def findings(log: RunLog) -> list[Finding]:
    """All findings of a run, the highest score first."""
    found = [finding for symptom in SYMPTOMS for finding in symptom(log)]
    return sorted(found, key=lambda finding: -finding.score)
