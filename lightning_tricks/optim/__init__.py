"""Parameter groups, optimizers and gradient clipping: torch only, no Lightning."""

from lightning_tricks.optim.adamw_bf16_state import AdamWBF16State as AdamWBF16State
from lightning_tricks.optim.adamw_cautious_decay import AdamWCautiousDecay as AdamWCautiousDecay
from lightning_tricks.optim.build_optimizer import build_optimizer as build_optimizer
from lightning_tricks.optim.clip import clip_grad_norm as clip_grad_norm
from lightning_tricks.optim.clip import clip_grad_value as clip_grad_value
from lightning_tricks.optim.clip import grad_norms_of as grad_norms_of
from lightning_tricks.optim.composed_optimizer import ComposedOptimizer as ComposedOptimizer
from lightning_tricks.optim.composed_optimizer import MatrixAdamW as MatrixAdamW
from lightning_tricks.optim.composed_optimizer import MuonAdamW as MuonAdamW
from lightning_tricks.optim.composed_optimizer import skips_on_device as skips_on_device
from lightning_tricks.optim.decay_groups import LayerwiseLRDecay as LayerwiseLRDecay
from lightning_tricks.optim.decay_groups import ParamRule as ParamRule
from lightning_tricks.optim.decay_groups import decay_groups as decay_groups
from lightning_tricks.optim.decay_groups import groups_table as groups_table
from lightning_tricks.optim.matrix_layout import MatrixLayout as MatrixLayout
from lightning_tricks.optim.muon import Muon as Muon
from lightning_tricks.optim.mup import MuP as MuP
from lightning_tricks.optim.param_roles import MATRICES as MATRICES
from lightning_tricks.optim.param_roles import RoledParam as RoledParam
from lightning_tricks.optim.param_roles import param_roles as param_roles
from lightning_tricks.optim.schedule_free import check_constant as check_constant
from lightning_tricks.optim.schedule_free import schedule_free_parts as schedule_free_parts
