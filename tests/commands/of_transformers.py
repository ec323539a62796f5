"""What a fresh process imports that loads an exported folder, for a server of `harness.preloaded`: nothing of ours."""

# ruff: noqa: F401

import gguf
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, modeling_gguf_pytorch_utils
from transformers.models.apertus import modeling_apertus
from transformers.models.arcee import modeling_arcee
from transformers.models.gpt2 import modeling_gpt2
from transformers.models.llama import modeling_llama
from transformers.models.qwen3 import modeling_qwen3
