"""Which parameters of two models differ, and by how much: one run on a rented GPU has to tell."""

from harness.runs import whole
from torch import nn


def differences(one: nn.Module, other: nn.Module) -> list[str]:
    """A line for each parameter that is not the same to the bit; a NaN differs from itself."""
    lines = []
    for (name, a), (_, b) in zip(one.named_parameters(), other.named_parameters(), strict=True):
        a, b = whole(a), whole(b).to(a.device)
        if unequal := int((a != b).sum()):
            most = (a.double() - b.double()).abs().max().item()
            lines.append(f"{name}: {unequal:,} of {a.numel():,} differ, by {most:.2e} at most; {a.abs().max():.2e}")
    return lines
