"""Linear layers in 8 bits by torchao: which layers, how they multiply, how FSDP2 gathers them."""
