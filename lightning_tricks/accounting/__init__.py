"""The cost of a run in FLOPs: arithmetic, no Lightning; torch is imported only to count or measure."""

from lightning_tricks.accounting.flops import Attention as Attention
from lightning_tricks.accounting.flops import DecoderShape as DecoderShape
from lightning_tricks.accounting.flops import attention_flops_per_token as attention_flops_per_token
from lightning_tricks.accounting.flops import matmul_parameters as matmul_parameters
from lightning_tricks.accounting.flops import training_flops_per_token as training_flops_per_token
from lightning_tricks.accounting.gpus import peak_flops as peak_flops
from lightning_tricks.accounting.gpus import peak_source as peak_source
from lightning_tricks.accounting.recompute import Checkpointing as Checkpointing
from lightning_tricks.accounting.recompute import recompute_flops_per_token as recompute_flops_per_token
