"""The norm of the gradients before the clip."""
