"""EMA and TailAverage of a sharded module: each rank averages its shards, and any other layout goes on with them."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from foreign import PLUGINS, CausalLM, rows
from harness import processes
from harness.runs import same, trainer_with, whole
from torch.distributed.tensor.debug import CommDebugMode

from lightning_tricks.callbacks import EMA, InitFrom, SafeCheckpoint, TailAverage
from lightning_tricks.checkpoints import AtomicCheckpointIO, open_checkpoint
from lightning_tricks.checkpoints.record import KEY
from lightning_tricks.guards.averaged_weights import Swap
from lightning_tricks.parallel.shard import drop_gathered
from lightning_tricks.strategies import FSDP2Strategy

pytestmark = pytest.mark.long
AVERAGES = {"ema": lambda: EMA(decay=0.8), "tail_average": lambda: TailAverage(horizon_steps=4, blend=0.6)}


class Model(CausalLM):
    """Tied weights; keeps the losses of validations."""

    def __init__(self) -> None:
        super().__init__()
        self.model.lm_head.weight = self.model.model.embed_tokens.weight
        self.validated: list[float] = []

    def validation_step(self, batch, batch_idx):
        loss = self.model(input_ids=batch, labels=batch).loss
        if dist.is_initialized():
            dist.all_reduce(loss)
            loss /= dist.get_world_size()
        self.validated.append(loss.item())


def fit(*callbacks, world: int = 1, rank: int = 0, strategy: Any = None, plugin: str | None = None, **options: Any):
    """Train to step six, with a validation after each third one, where an epoch ends."""
    model, steps = Model(), options.pop("steps", 6)
    given = [PLUGINS[plugin]()] if plugin else []
    trainer = trainer_with(
        *callbacks, devices=world, max_steps=steps, logger=False, strategy=strategy or "auto", limit_val_batches=1,
        plugins=given if strategy else [*given, AtomicCheckpointIO()], use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(model, rows(rank, world), rows(rank, world), **options)
    drop_gathered(model)  # by the last validation
    return model, trainer


def averages_of(callback: Any) -> dict[str, dict[str, torch.Tensor]]:
    """Every average, gathered, by term and name."""
    return {
        term: {name: whole(value) for name, value in callback.weights.by_name(average).items()}
        for term, average in callback.terms.items()
    }


def shards_of(callback: Any) -> list[torch.Tensor]:
    return [tensor for average in callback.terms.values() for tensor in average]


class Recorder(pl.Callback):
    """The gathered weights after each step."""

    def __init__(self) -> None:
        self.found: list[dict[str, torch.Tensor]] = []

    def on_train_batch_end(self, trainer, pl_module, *args):
        self.found.append({name: whole(value) for name, value in pl_module.named_parameters()})


class Start(pl.Callback):
    """The average before the first step."""

    def on_train_start(self, trainer, pl_module):
        average = trainer.callbacks[0]
        self.found, self.progress = averages_of(average), average.progress()


def trained_by_two(rank: int, folder: Path, expected: dict[str, Any]) -> None:
    plain, _ = fit(world=2, rank=rank, strategy=FSDP2Strategy())
    unsaved, _ = fit(EMA(decay=0.8), world=2, rank=rank, strategy=FSDP2Strategy())
    assert unsaved.losses == plain.losses, "after a validation, a step has used what was gathered in it"
    for kind, (averages, validated) in expected.items():
        callback, recorder = AVERAGES[kind](), Recorder()
        saver = SafeCheckpoint(folder / kind, every_n_train_steps=3, keep_last=9)
        model, _ = fit(callback, recorder, saver, world=2, rank=rank, strategy=FSDP2Strategy())
        assert model.losses == plain.losses, "the average has changed the training"
        assert same([p.to_local() for p in model.parameters()], [p.to_local() for p in plain.parameters()])
        assert model.validated == pytest.approx(validated, rel=1e-5)
        assert model.validated[1:] != plain.validated[1:]
        for term, found in averages_of(callback).items():
            for name, value in found.items():
                torch.testing.assert_close(value, averages[term][name], rtol=1e-4, atol=1e-5, msg=f"{kind} {name}")
        if kind == "ema":  # the same arithmetic on the whole weights of each step
            for name, average in averages_of(callback)["mean"].items():
                if name != "model.lm_head.weight":
                    by_hand = expected_ema(recorder.found, name)
                    torch.testing.assert_close(average, by_hand, rtol=1e-6, atol=1e-8)
        held, numbers = sum(t.numel() for t in shards_of(callback)), sum(p.numel() for p in model.parameters())
        assert held <= 0.6 * numbers * len(callback.terms), "each rank averages its own shards"
        resumed = AVERAGES[kind]()
        path = folder / kind / "step=3.ckpt"
        other, _ = fit(resumed, world=2, rank=rank, strategy=FSDP2Strategy(), ckpt_path=path)
        assert (other.losses, other.validated) == (model.losses[3:], model.validated[2:])
        assert same(shards_of(resumed), shards_of(callback)), f"{kind}: the resumed average differs"
        assert resumed.progress() == callback.progress()
        swap = Swap(callback.weights, callback.terms["mean"])
        with CommDebugMode() as communication:
            callback.weights.move(next(iter(callback.terms.values())), 0.1)
            swap.enter()
            swap.leave()
        assert communication.get_total_counts() == 0


START: dict[str, torch.Tensor] = {name: p.detach().clone() for name, p in Model().named_parameters()}


def expected_ema(weights: list[dict[str, torch.Tensor]], name: str) -> torch.Tensor:
    average = START[name].clone()
    for update, found in enumerate(weights):
        average.lerp_(found[name], 1 - min(0.8, (1 + update) / (10 + update)))
    return average


def other_layouts_of_two(rank: int, folder: Path) -> None:
    """bf16 weights in one file; a folder that is written in the background; DDP; a new run."""
    for name, whole_file, plugin in (("file", True, "bf16_true"), ("background", False, None)):
        shared = {"world": 2, "rank": rank, "plugin": plugin}
        ema = EMA(decay=0.8, blend=0.6)
        saver = SafeCheckpoint(folder / name, every_n_train_steps=3, asynchronous=not whole_file)
        model, _ = fit(ema, saver, strategy=FSDP2Strategy(save_distributed_checkpoint=not whole_file), **shared)
        assert all(average.dtype == torch.float32 for average in shards_of(ema))
        resumed = EMA(decay=0.8)
        fit(resumed, strategy=FSDP2Strategy(), ckpt_path=folder / name / "step=3.ckpt", **shared)
        assert same(shards_of(resumed), shards_of(ema)), name
        save(rank, folder / name / "expected.pt", averages_of(ema)["mean"])
        save(rank, folder / name / "weights.pt", {key: whole(value) for key, value in model.named_parameters()})
    look, init_from = Recorder(), InitFrom(folder / "background" / "last.ckpt", average="ema")
    fit(look, init_from, world=2, rank=rank, strategy=FSDP2Strategy(), steps=1)
    save(rank, folder / "started.pt", look.found[0])


def save(rank: int, path: Path, content: Any) -> None:
    if rank == 0:
        torch.save(content, path)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """What one process has averaged and validated, and the folders of two that did the same."""
    folder, expected = tmp_path_factory.mktemp("averages"), {}
    for kind, make in AVERAGES.items():
        callback = make()
        model, _ = fit(callback)
        expected[kind] = (averages_of(callback), model.validated)
    processes.run(trained_by_two, folder, expected)
    return folder


def test_two_ranks_average_their_shards_to_what_one_process_has_and_resume_to_the_bit(written):
    assert {path.name for path in (written / "ema").iterdir()} == {"step=3.ckpt", "step=6.ckpt", "last.ckpt"}
    added = torch.load(written / "ema/last.ckpt/meta.pt", weights_only=True)[KEY]
    assert added["module"] == "Model"  # and not the class of torch that `fully_shard` has given it


@pytest.mark.parametrize("strategy", [None, FSDP2Strategy], ids=["plain", "fsdp2"])
@pytest.mark.parametrize("kind", AVERAGES)
def test_one_process_goes_on_with_the_averages_of_two(written, kind, strategy):
    path = written / kind / "step=3.ckpt"
    there = open_checkpoint(path)["averages"]["tail_average" if kind == "tail_average" else "ema"]
    here, start = AVERAGES[kind](), Start()
    fit(here, start, strategy=strategy() if strategy else None, ckpt_path=path, steps=4)
    for term, found in start.found.items():
        assert same(list(found.values()), [there["weights"][term][name] for name in found])
    assert start.progress == there["progress"]


def test_a_file_the_background_and_bf16_hold_the_average_too(tmp_path):
    processes.run(other_layouts_of_two, tmp_path)
    for name in ("file", "background"):
        checkpoint = AtomicCheckpointIO().load_checkpoint(tmp_path / name / "last.ckpt")
        found, expected = checkpoint["averages"]["ema"]["weights"]["mean"], torch.load(tmp_path / name / "expected.pt")
        assert found.keys() == expected.keys()
        assert same(list(found.values()), list(expected.values())), name
        assert all(type(value) is torch.Tensor for value in found.values()), name
        blend = open_checkpoint(tmp_path / name / "last.ckpt", average="ema")["state_dict"]
        for key, value in torch.load(tmp_path / name / "weights.pt").items():
            by_hand = (0.4 * value.double() + 0.6 * expected[key].double()).to(value.dtype)
            torch.testing.assert_close(blend[key], by_hand, msg=f"{name} {key}")
    one, _ = fit(InitFrom(tmp_path / "background" / "last.ckpt", average="ema"), steps=1)
    for name, value in torch.load(tmp_path / "started.pt").items():
        torch.testing.assert_close(dict(one.named_parameters())[name].detach(), value, rtol=1e-4, atol=1e-5)
