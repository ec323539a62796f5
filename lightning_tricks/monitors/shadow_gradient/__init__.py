"""The gradient of one micro-batch in fp32, compared with the one that the run computed."""
