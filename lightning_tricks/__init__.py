"""PyTorch Lightning, ready to pretrain language models."""

__version__ = "0.1.0"
