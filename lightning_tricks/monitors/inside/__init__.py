"""The numbers inside a model: the outputs of its blocks and the logits of its attention."""
