"""In place of CUDA graphs on a CPU: functions that are recorded, and run again on the same tensors."""

from typing import Any

import torch
from torch import Tensor

from lightning_tricks.callbacks import CUDAGraphs
from lightning_tricks.guards import cuda_graphs


class Replays:
    """Is `cuda_graphs.capture`: a replay writes where the first run has written, as a graph does. Counts them.

    That is into the results, and into the tensors that were the gradients then, whatever the gradients are now.

    Attributes:
        lists: to which backward passes add tensors; what a replay adds is put into the tensor of the first run.
        clear: empties lists to which forward passes add tensors, called before and after each run.
    """

    def __init__(self):
        self.captured = self.replayed = 0
        self.lists, self.clear = lambda: [], lambda: None
        self.parameters: list[Any] = []

    @classmethod
    def take_over(cls, monkeypatch: Any) -> "Replays":
        """Let CUDAGraphs record functions, on any device."""
        found = cls()

        class Calls(cuda_graphs._Calls):
            def __init__(self, model: Any, *args: Any) -> None:
                super().__init__(model, *args)
                found.parameters = [*model.parameters()]

        monkeypatch.setattr(cuda_graphs, "_Calls", Calls)
        monkeypatch.setattr(cuda_graphs, "capture", found)
        monkeypatch.setattr(CUDAGraphs, "check_run", lambda *_: None)
        return found

    def __call__(self, run, pool):
        self.captured += 1
        gradients = [parameter.grad for parameter in self.parameters]
        with torch.random.fork_rng():  # nothing is drawn: kernels do not run in a capture
            first, _ = self._run(run)

        def replay():
            self.replayed += 1
            now = [parameter.grad for parameter in self.parameters]
            self._set(gradients)
            again, added = self._run(run)
            self._set(now)
            for own in added:
                del own[-1]
            with torch.no_grad():
                for old, new in zip(first, again, strict=True):
                    old.copy_(new)

        return replay

    def _set(self, gradients):
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient

    def _run(self, run):
        """The tensors of the result, then those that were added to the lists; and the lists that were added to."""
        self.clear()
        lists = self.lists()
        lengths = [len(own) for own in lists]
        with torch.enable_grad():
            found = [one.detach() for one in run() or () if isinstance(one, Tensor)]
        added = [own for own, length in zip(lists, lengths, strict=True) if len(own) > length]
        self.clear()
        return found + [own[-1].detach() for own in added], added
