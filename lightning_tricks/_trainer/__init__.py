"""Lightning's private state: the only folder that reads it, and that compares the class names of Lightning's objects.

Each function names the place in Lightning 2.6.6 from which it was read. `tests/test_trainer.py` compares each answer
with the behaviour of a Trainer, and fails where another version differs. No file here imports Lightning, because a
Trainer may be of either package, `lightning` or `pytorch_lightning`.
"""
