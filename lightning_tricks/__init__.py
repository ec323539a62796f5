"""PyTorch Lightning, ready to pretrain language models.

The names below are imported when they are first used, so that `import lightning_tricks` costs nothing.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "accounting": ["count_flops", "peak_flops", "recompute_flops_per_token", "training_flops_per_token"],
    "callbacks": [
        "ActivationMonitor",
        "AttentionMonitor",
        "CompressionBaseline",
        "GradNormMonitor",
        "LRMonitor",
        "LeanLoop",
        "MemoryMonitor",
        "MFUMonitor",
        "MetricBuffer",
        "PrecisionMonitor",
        "PredictionWriter",
        "RankMonitor",
        "SampleText",
        "TensorBoardDashboard",
        "TrainingProgressBar",
        "UpdateMonitor",
    ],
    "cli": ["RecipeCLI", "load_recipe"],
    "data": ["TextData", "TokenData"],
    "language_model": ["LanguageModel"],
    "loggers": ["ResumingCSVLogger", "ResumingTensorBoardLogger"],
    "metrics": ["BitsPerByte", "TokenLoss", "TokenPerplexity"],
    "mixins": ["GradientClippingMixin", "OptimizerMixin", "TokenMeanMixin"],
    "models": ["GPT2", "Decoder", "DecoderConfig", "Llama", "Sampling", "generate"],
    "optim": ["ParamRule", "clip_grad_norm", "decay_groups"],
    "precision": ["AutoPrecision", "BF16Mixed", "BF16True", "FP16Mixed", "Float8"],
    "schedules": [
        "CosineRestarts",
        "Schedule",
        "ScheduleLR",
        "WarmupConstant",
        "WarmupCosine",
        "WarmupInverseSqrt",
        "WarmupLinear",
        "WarmupStableDecay",
    ],
    "strategies": ["DeepSpeedZeROStrategy", "FSDP2Strategy", "consolidate_deepspeed"],
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [*_HOME_OF, "__version__"]


def __getattr__(name: str) -> Any:
    """Import a public name's home when the name is first asked for."""
    if name not in _HOME_OF:
        raise AttributeError(f"module 'lightning_tricks' has no attribute {name!r}")
    return getattr(importlib.import_module(f"lightning_tricks.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
