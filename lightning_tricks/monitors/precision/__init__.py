"""The effect of 16-bit and 8-bit formats on the numbers of a run."""
