"""What a fresh process imports that loads an exported folder, for a server of `harness.preloaded`: nothing of ours."""

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.apertus import modeling_apertus
from transformers.models.gpt2 import modeling_gpt2
from transformers.models.llama import modeling_llama
from transformers.models.qwen3 import modeling_qwen3

__all__ = [
    "AutoModelForCausalLM",
    "AutoTokenizer",
    "modeling_apertus",
    "modeling_gpt2",
    "modeling_llama",
    "modeling_qwen3",
    "torch",
]
