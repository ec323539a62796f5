"""Parameter groups, optimizers and gradient clipping: torch only, no Lightning."""

from lightning_tricks.optim.adamw_bf16_state import AdamWBF16State
from lightning_tricks.optim.build_optimizer import OptimizerFactory, build_optimizer, default_adamw
from lightning_tricks.optim.clip import clip_grad_norm, clip_grad_value, grad_norms_of
from lightning_tricks.optim.composed_optimizer import ComposedOptimizer, skips_on_device
from lightning_tricks.optim.decay_groups import check_each_parameter_once, decay_groups, groups_table
from lightning_tricks.optim.keep_settings_on_load import keep_settings_on_load
from lightning_tricks.optim.matrix_layout import MatrixLayout
from lightning_tricks.optim.muon import Muon
from lightning_tricks.optim.muon_adamw import MatrixAdamW, MuonAdamW
from lightning_tricks.optim.mup import MuP
from lightning_tricks.optim.param_roles import MATRICES, RoledParam, param_roles
from lightning_tricks.optim.param_rule import LayerwiseLRDecay, ParamRule, match_rules
from lightning_tricks.optim.schedule_free import check_constant, schedule_free_parts

__all__ = [
    "MATRICES",
    "AdamWBF16State",
    "ComposedOptimizer",
    "LayerwiseLRDecay",
    "MatrixAdamW",
    "MatrixLayout",
    "MuP",
    "Muon",
    "MuonAdamW",
    "OptimizerFactory",
    "ParamRule",
    "RoledParam",
    "build_optimizer",
    "check_constant",
    "check_each_parameter_once",
    "clip_grad_norm",
    "clip_grad_value",
    "decay_groups",
    "default_adamw",
    "grad_norms_of",
    "groups_table",
    "keep_settings_on_load",
    "match_rules",
    "param_roles",
    "schedule_free_parts",
    "skips_on_device",
]
