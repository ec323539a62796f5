"""What parts of the collection look for on each other's objects, and on yours: a class has it by having these names.

A module, data module, precision plugin, callback or optimizer needs none of them. One that has them is treated better,
whoever wrote it: its FLOPs are not counted but asked for, its checkpoint is saved in its own way.
"""

from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class KnowsFlops(Protocol):
    """A LightningModule for MFUMonitor, which counts the operations of another one in its first step."""

    def flops_per_token(self, seq_len: int, attention: Any) -> tuple[float, float]:
        """Of the forward and backward pass, and of what activation checkpointing computes again."""


@runtime_checkable
class KnowsWeights(Protocol):
    """A LightningModule that builds its weights in `configure_model`: they are checked before a process is started."""

    def without_data(self) -> Any:
        """A module with the same parameters on the device `meta`."""


@runtime_checkable
class HasStages(Protocol):
    """A model for `mesh: {pipeline: ...}`, whose repeated blocks are shared out among the ranks.

    A `training_step` gets its loss from one call of the model, and divides the sum that it returns.
    """

    def pipeline_plan(self) -> dict[str, str]:
        """Of its other parts with parameters, by name: `first` or `last`, the stage that has it.

        A part is None where a rank does not have it. Parts without parameters stay on every rank. FSDP2 gathers the
        embeddings and linear layers among these when they are called, also without stages: so `stage` calls them, and
        does not read their weights.
        """

    def stage(self, x: Any, blocks: Any, *, last: bool, **inputs: Any) -> Any:
        """What one stage computes, of one micro-batch.

        Args:
            x: hidden states of the stage before, one tensor or a tuple of them; None on the first stage.
            blocks: the blocks of this stage.
            last: whether to return the loss, summed over what counts, and else hidden states of the form of `x`.
            **inputs: what `forward` takes, by name, without None; tensors have the rows of the micro-batch.
        """


@runtime_checkable
class CountsInBackward(Protocol):
    """A module to which backward passes add what they count, as the router of experts.

    Attributes:
        backward_loads: one item for each backward pass; always the same list.
    """

    backward_loads: list[Any]


@runtime_checkable
class HasExperts(Protocol):
    """A mixture for `mesh: {expert: ...}`.

    Attributes:
        experts: a module that takes rows in the order of their experts, and the last row of each expert. Its own
            parameters have the expert as the first of three dimensions; it works with the part of them that is here.
        exchange: None, or to be called with these two and `experts` in its place, see `ExpertExchange`.
    """

    exchange: Any  # `experts` is not declared: from Python 3.12 on `isinstance` sees no submodules

    def sent_between_expert_ranks(self) -> int:
        """Elements of the rows that are sent for a token, there and back."""


@runtime_checkable
class KnowsBaseShapes(Protocol):
    """A LightningModule for MuP."""

    def base_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape in the base model of each parameter, by its name."""


@runtime_checkable
class KnowsSamples(Protocol):
    """A data module whose data are addressed by position, for messages and records that name them."""

    def step_samples(self) -> list[tuple[int, int]] | None:
        """First and last position of each run of samples that the running optimizer step takes, of all ranks."""


@runtime_checkable
class CastsShards(Protocol):
    """A precision plugin whose casts FSDP2 does."""

    fsdp2_policy: Any  # a torch.distributed.fsdp.MixedPrecisionPolicy


@runtime_checkable
class KnowsPeak(Protocol):
    """A precision plugin whose products are faster than its name tells."""

    peak_dtype: str | None  # a column of the table of peaks; None for that of its name


@runtime_checkable
class SavesNow(Protocol):
    """A callback that saves the run whenever it is asked, for Preemption."""

    def save_now(self, trainer: Any) -> str | None:
        """Path of what it has saved; None if it could not: then that of its attribute `last_model_path`, if any."""


@runtime_checkable
class BeginsNextEpoch(Protocol):
    """A callback with which a run that goes on from an epoch's last step begins the next epoch, also by `max_steps`."""

    begins_next_epoch: bool


@runtime_checkable
class FollowsRollback(Protocol):
    """A callback that wants to be told when SpikeRollback has brought earlier weights back."""

    def after_rollback(self) -> None:
        """Forget what belongs to the steps that were undone."""


@runtime_checkable
class KeepsRollbackState(Protocol):
    """A callback whose state SpikeRollback copies with the weights."""

    state_key: str

    def rollback_state(self) -> dict[str, Any] | None:
        """Tensors and numbers."""

    def load_rollback_state(self, state: dict[str, Any] | None) -> None:
        """Take them back."""


@runtime_checkable
class SkipsOnDevice(Protocol):
    """An optimizer that StepGuard can have skip a step without a wait for the device."""

    skips_on_device: bool  # whether a step changes nothing where the attribute `found_inf`, a 0-dim tensor, is 1


@runtime_checkable
class StepsInBatches(Protocol):
    """An optimizer whose temporary memory `plan` foretells."""

    steps_in_batches: bool  # whether it is that of one batch of weights, as Muon's, and not of all weights


@runtime_checkable
class KnowsMuPRule(Protocol):
    """An optimizer for MuP, whose learning rates follow a known rule."""

    mup_rule: Any  # `adam`, `sgd` or `muon`
