"""Who decays, which optimizer, and the one clip: torch only."""

from lightning_tricks.optim.build_optimizer import build_optimizer
from lightning_tricks.optim.clip import clip_grad_norm, clip_grad_norm_fsdp1, clip_grad_value, grad_norms_of
from lightning_tricks.optim.decay_groups import ParamRule, check_each_parameter_once, decay_groups, groups_table
from lightning_tricks.optim.follow_recipe import follow_recipe
from lightning_tricks.optim.param_roles import param_roles

__all__ = [
    "ParamRule",
    "build_optimizer",
    "check_each_parameter_once",
    "clip_grad_norm",
    "clip_grad_norm_fsdp1",
    "clip_grad_value",
    "decay_groups",
    "follow_recipe",
    "grad_norms_of",
    "groups_table",
    "param_roles",
]
