"""The reference decoder: one model, Llama or GPT-2 by its config."""

from lightning_tricks.models.decoder import Decoder as Decoder
from lightning_tricks.models.decoder_config import GPT2 as GPT2
from lightning_tricks.models.decoder_config import DecoderConfig as DecoderConfig
from lightning_tricks.models.decoder_config import Llama as Llama
from lightning_tricks.models.generate import Sampling as Sampling
from lightning_tricks.models.generate import generate as generate
from lightning_tricks.models.hf_adapter import decoder_config as decoder_config
from lightning_tricks.models.hf_adapter import fold_factors as fold_factors
from lightning_tricks.models.hf_adapter import folded_state as folded_state
from lightning_tricks.models.hf_adapter import from_hf as from_hf
from lightning_tricks.models.hf_adapter import hf_config as hf_config
from lightning_tricks.models.hf_adapter import hf_family as hf_family
from lightning_tricks.models.hf_adapter import hf_weights as hf_weights
from lightning_tricks.models.hf_adapter import to_hf as to_hf
