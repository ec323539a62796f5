"""Old name of a part of `harness`."""

from harness.models import GPT, LLAMA, SHAPE, Decoder, Decoding  # noqa: F401
from harness.runs import CountsFlops, Memory, Run, decoding, fit, same_training  # noqa: F401
