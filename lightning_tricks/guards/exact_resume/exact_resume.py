"""Resume in mid-epoch with the batch that would have come next, and with the random state of every process.

Lightning saves no random state, and begins a loader that it does not know at its first batch again, with a warning.
"""

import warnings
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.protocols import SavesNow
from lightning_tricks._core.random_state import gather, random_state, saved_random_states, set_random_state_of
from lightning_tricks._core.replaced import replaced
from lightning_tricks._trainer.lightning import Module, Trainer, pl
from lightning_tricks._trainer.loop import (
    batch_progress,
    end_restart,
    epoch_is_over,
    forget_running_batch,
    go_on_with_next_epoch,
    reopen_epoch,
    set_consumed,
    within_step,
)
from lightning_tricks._trainer.objects import is_a
from lightning_tricks._trainer.run_facts import data_rank, random_rank
from lightning_tricks._trainer.saves import DeferredSaves, save_whole_step
from lightning_tricks.guards.exact_resume import extra_state
from lightning_tricks.guards.exact_resume.loaders import (
    Replay,
    ServedLoader,
    StatefulLoader,
    can_be_replayed,
    has_state,
    replayed,
)
from lightning_tricks.guards.exact_resume.order import describe, say, transfer

__all__ = ["ExactResume"]

_CANNOT_FOLLOW = (
    "it cannot be resumed in mid-epoch and starts again; give a DataLoader over a dataset that is no iterator, or a "
    "loader with state_dict and load_state_dict"
)
_UNTRUE_WARNING = "You're resuming from a checkpoint that ended before the epoch ended"


class ExactResume(pl.Callback):
    """Saves and restores the place in each training loader; changes their random numbers, and delays some saves.

    A run that is killed and resumed has the losses, learning rates, gradient norms and weights of the run that nobody
    killed, to the bit: with any LightningModule and torch's DataLoader over a map-style dataset (any sampler, any
    number of workers, also another one than before) or an IterableDataset, several of them at once, alone or in several
    processes. Rows are passed over without loading them; an IterableDataset without `state_dict` is read again up to
    its place. docs/exact_resume.md has a table of promises for each kind of loader.

    Each batch of a training loader is made under a seed that follows from the loader's seed, the epoch and the number
    of the batch. The loader's seed is drawn when training begins. So the order of rows and random augmentation differ
    from those of a run without this callback, and loaders no longer move the random numbers of the model.

    A ModelCheckpoint saves whole optimizer steps only, and after the validation that is due.

    Loaders with an attribute `addressed_by_position`, as those of `TextData` and `TokenData`, are left alone. A loader
    that cannot be followed is named in one line, and its data start again on resume. So is each of Lightning's own
    callbacks beside which a resume is not exact, such as StochasticWeightAveraging; docs/exact_resume.md has a table.

    Raises:
        UsageError: `reload_dataloaders_every_n_epochs` is set; on resume, the number of loaders is another one, or that
            of the processes or workers of an IterableDataset, or the batch size of one without a state, or
            `trainer.estimated_stepping_batches` was read before the checkpoint was loaded.
    """

    begins_next_epoch = True  # Preemption and SafeCheckpoint ask for this

    def __init__(self) -> None:
        self._trainer: Any = None
        self._replacements = ExitStack()
        self._resumes = True  # what is loaded; False: it is evaluated
        self._reset()

    def _reset(self) -> None:
        self._followed: list[Replay | StatefulLoader | None] = []  # in the order of the training loaders
        self._names: list[str] = []
        self._loaded: dict[str, Any] | None = None  # the state of a checkpoint
        self._own: dict[str, Any] = {}  # and this process's part of it
        self._random: list[dict[str, Any]] = []  # of the checkpoint's processes
        self._at_end: dict[str, Any] | None = None  # state of this process when training ended
        self._random_at_end: dict[str, Any] | None = None
        self._counted_by = 0  # batches of the loader that has done the most in this epoch
        self._more_batches = 0  # to add to those done, where batches have another size now
        self._resumed_at = 0  # batches of the epoch that another process has trained
        self._has_trained = False  # a batch, in this fit
        self._random_to_set = False

    def check_run(self, trainer: Any, datamodule: Any, stage: str) -> None:
        """Refuse loaders that are made anew, before any process is started."""
        if stage == "fit" and (every := trainer.reload_dataloaders_every_n_epochs):
            raise UsageError(
                f"reload_dataloaders_every_n_epochs={every}: ExactResume goes on in the loaders that it began with; "
                "set it to 0, and let a sampler's set_epoch(epoch) change the data"
            )

    def setup(self, trainer: Trainer, pl_module: Module, stage: str) -> None:
        """Follow each training loader that Lightning has processed; hold each ModelCheckpoint back."""
        self.check_run(trainer, None, stage)
        if stage != "fit":
            return
        self._trainer = trainer
        self._reset()
        process = trainer.strategy.process_dataloader

        def process_and_follow(loader: Any) -> Any:
            loader = process(loader)
            return self._follow(loader) if trainer.training else loader

        self._replacements.close()
        self._replacements.enter_context(replaced(trainer.strategy, "process_dataloader", process_and_follow))
        for saver in trainer.checkpoint_callbacks:
            if is_a(saver, "ModelCheckpoint") and not isinstance(saver, SavesNow):  # which saves whole steps by itself
                DeferredSaves(saver, self._replacements)
        extra_state.follow_accumulation(trainer, self._replacements)
        extra_state.warn_of_other_callbacks(trainer)

    def _follow(self, loader: Any) -> Any:
        """Serve a training loader so that its position is known, if that can be; else say that it cannot."""
        index = len(self._followed)
        name = f"training loader {index + 1} ({type(loader).__name__})"
        follower: Replay | StatefulLoader | None = None
        if can_be_replayed(loader):
            if loader.num_workers and loader.persistent_workers:
                say(name, "persistent_workers=True has no effect: workers restart each epoch")
            seed = int(torch.empty((), dtype=torch.int64).random_())
            loader = replayed(loader, seed, data_rank(self._trainer)[0], self._fetched)
            follower = loader.replay
        elif has_state(loader):
            loader = follower = StatefulLoader(loader, self._fetched)
        else:
            if not getattr(loader, "addressed_by_position", False):
                say(name, _CANNOT_FOLLOW)
            loader = ServedLoader(loader, self._fetched)
        self._followed.append(follower)
        self._names.append(name)
        self._hand_out(index)
        return loader

    def _fetched(self) -> None:
        if self._random_to_set:
            extra_state.catch_up(self._trainer, self._own["extra_state"])
            self._set_random_state()

    def _set_random_state(self) -> None:
        set_random_state_of(random_rank(self._trainer), self._random)

    def on_train_start(self, trainer: Trainer, pl_module: Module) -> None:
        """On resume, count in this run's batches and restore the random state."""
        if self._loaded is None:
            return
        saved = len(self._own["loaders"])
        if saved not in (0, len(self._followed)):
            raise UsageError(f"training loaders: the checkpoint's run had {saved}, this one has {len(self._followed)}")
        progress = batch_progress(trainer)
        for tracker in (progress.current, progress.total):
            tracker.load_state_dict({name: number + self._more_batches for name, number in vars(tracker).items()})
        forget_running_batch(trainer)
        extra_state.put_back(trainer, self._own["extra_state"])
        if self._loaded["epoch_over"]:
            go_on_with_next_epoch(trainer)
            extra_state.catch_up(trainer, self._own["extra_state"])
        else:
            self._resumed_at = progress.current.processed
        if all(follower is not None for follower in self._followed):
            self._replacements.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", _UNTRUE_WARNING)
        self._set_random_state()
        self._random_to_set = True  # again with the first batch, because other callbacks may draw numbers until then

    def on_train_epoch_start(self, trainer: Trainer, pl_module: Module) -> None:
        """Where a run goes on at an epoch's start, restore the random state: this hook's draws came after the save."""
        self._fetched()
        self._random_to_set = False
        if not self._has_trained and not self._resumed_at:
            return  # a batch may have been fetched ahead
        self._resumed_at = 0
        for follower in self._followed:
            if follower is not None:
                follower.begin_epoch()

    def on_train_batch_start(self, trainer: Trainer, pl_module: Module, batch: Any, batch_idx: int) -> None:
        """Leave the random state alone from now on: it was restored when the first batch was fetched."""
        if self._random_to_set:  # nothing was fetched: it was fetched ahead
            extra_state.catch_up(trainer, self._own["extra_state"])
        self._random_to_set = False

    def on_train_batch_end(self, trainer: Trainer, pl_module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Forget the places from before the step that comes next."""
        if not self._has_trained:
            self._has_trained = True
            end_restart(trainer)
            extra_state.warn_of_epoch_means(trainer)
        for follower in self._followed:
            if follower is not None:
                follower.places.forget_before(self._next_step())

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Module) -> None:
        """End the passes of which no batch was asked for on resume, because another loader was at its end already."""
        for follower in self._followed:
            if isinstance(follower, Replay):
                follower.end_pass()

    def on_train_end(self, trainer: Trainer, pl_module: Module) -> None:
        """Keep the state for a checkpoint that is saved after `fit`, when Lightning has let its loaders go."""
        self._at_end, self._random_at_end = self._own_state(), random_state()

    def on_exception(self, trainer: Trainer, pl_module: Module, exception: BaseException) -> None:
        """Put the replaced methods back."""
        self._replacements.close()

    def teardown(self, trainer: Trainer, pl_module: Module, stage: str) -> None:
        """Put the replaced methods back."""
        self._replacements.close()

    def _next_step(self) -> int:
        """The first batch of the step that is not done, counted from the first one of this epoch in this process."""
        return batch_progress(self._trainer).current.processed - within_step(self._trainer)[0] - self._resumed_at

    def _epoch_is_over(self) -> bool:
        return epoch_is_over(self._trainer) and within_step(self._trainer) == (0, False)

    def _own_state(self) -> dict[str, Any]:
        over = self._epoch_is_over()
        loaders = [None if f is None else self._loader_state(f, over) for f in self._followed]
        return {"loaders": loaders, "extra_state": extra_state.read(self._trainer)}

    def _loader_state(self, follower: Replay | StatefulLoader, over: bool) -> dict[str, Any]:
        if isinstance(follower, StatefulLoader):
            return follower.next_epoch() if over else follower.place_before(self._next_step())
        position = replace(follower.next_pass(), cycles=0) if over else follower.position_before(self._next_step())
        return describe(follower.loader, data_rank(self._trainer)[1]) | {"position": dict(vars(position))}

    def state_dict(self) -> dict[str, Any]:
        """Of every process: where its loaders are, from the start of a step. Every rank calls."""
        if self._trainer is None:
            return {}
        ranks = gather(self._at_end or self._own_state())
        return {"epoch_over": self._epoch_is_over(), "data_ranks": data_rank(self._trainer)[1], "ranks": ranks}

    def on_save_checkpoint(self, trainer: Trainer, pl_module: Module, checkpoint: dict[str, Any]) -> None:
        """A save within a step, as after an exception, is written as one from the step's start: its data come again."""
        save_whole_step(checkpoint, trainer, self._random_at_end)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: Module, checkpoint: dict[str, Any]) -> None:
        """A run that ended in mid-epoch goes on in that epoch; what is loaded to be evaluated goes on with nothing."""
        self._resumes = trainer.state.fn == "fit"
        if not self._resumes:
            return
        state = checkpoint["callbacks"].get(self.state_key)
        if state is None:
            return
        self._random = saved_random_states(checkpoint) or []
        if not state["epoch_over"]:
            reopen_epoch(checkpoint)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there, when training begins."""
        if not self._resumes:
            return
        rank, ranks = self._trainer.global_rank, state_dict["ranks"]
        self._loaded, self._own = state_dict, ranks[rank if rank < len(ranks) else 0]
        for index in range(len(self._followed)):
            self._hand_out(index)

    def _hand_out(self, index: int) -> None:
        """Give a loader its place from the checkpoint."""
        if self._loaded is None:
            return
        saved, there = self._own["loaders"], len(self._loaded["ranks"])
        same_ranks = (there, self._loaded["data_ranks"]) == (self._trainer.world_size, data_rank(self._trainer)[1])
        follower, state = self._followed[index], saved[index] if index < len(saved) else None
        if follower is None or state is None:
            return
        name = self._names[index]
        if isinstance(follower, Replay) and "position" in state:
            if follower.position.number >= 0:
                raise UsageError(
                    f"estimated_stepping_batches: reading it has begun {name} before the checkpoint was loaded; set "
                    "max_steps and read trainer.max_steps"
                )
            now = describe(follower.loader, data_rank(self._trainer)[1])
            position, more = transfer(name, follower.loader, state, now)
            follower.go_on_from(position)
            batches = state["position"]["batches"]
            if batches > self._counted_by:  # a shorter loader has ended, or begun again, and has counted fewer
                self._counted_by, self._more_batches = batches, more
            cycles = 0 if position is None else position.cycles
        elif isinstance(follower, StatefulLoader) and "state" in state and same_ranks:
            follower.resumed, cycles = state, state.get("cycles", 0)
        else:
            say(name, "the checkpoint has no place for it: its data start again")
            return
        if cycles:
            follower.places.at_first_batch = partial(set_consumed, self._trainer, index)
