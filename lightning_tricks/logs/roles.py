"""The names under which loggers have each metric. Imports nothing that takes time."""

from collections.abc import Mapping

from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.suggest import did_you_mean

ROLES: Mapping[str, tuple[str, ...]] = {  # the names under which loggers have each metric, the likeliest first
    "loss": ("train/loss", "train_loss", "train/loss_step", "train_loss_step", "training_loss", "loss"),
    "val_loss": (
        "val/loss", "val_loss", "valid/loss", "valid_loss", "validation/loss", "val/loss_epoch", "val_loss_epoch",
    ),
    "grad_norm": ("train/grad_norm", "grad_norm", "grad_2.0_norm_total"),
    "lr": ("train/lr", "lr", "learning_rate", "lr-AdamW", "lr-Adam", "lr-SGD"),
    "clip_norm": ("train/clip_norm",),
    "speed": (
        "throughput/tokens_per_second", "throughput/samples_per_second", "tokens_per_second",
        "device/samples_per_sec", "device/batches_per_sec",
    ),
    "loss_scale": ("precision/loss_scale", "loss_scale"),
    "skipped_steps": ("precision/skipped_steps",),
    "guarded_steps": ("guard/skipped_steps",),
    "mfu": ("throughput/mfu", "device/mfu"),
    "data_share": ("goodput/data",),
    "step_share": ("goodput/steps",),
    "optimizer_step": ("doctor/optimizer_step",),
}  # fmt: skip


def check_roles(names: Mapping[str, str]) -> None:
    """Refuse the name of a metric for a role that is none.

    Raises:
        UsageError: names the role and those that there are.
    """
    for role, name in names.items():
        if role not in ROLES:
            raise UsageError(f"names: {role}={name}{did_you_mean(role, ROLES)}: the roles are {', '.join(ROLES)}")
