"""What kind of run this is, and what happens around its saves."""

import re
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy, SingleDeviceStrategy

import lightning_tricks
from lightning_tricks import DeepSpeedZeROStrategy, FP16Mixed, FSDP2Strategy, ParallelDims
from lightning_tricks._core.errors import UsageError
from lightning_tricks._trainer import refusals
from lightning_tricks._trainer.refusals import Refusal
from lightning_tricks._trainer.run_facts import data_rank, enabled_scaler, loss_ranks, micro_batch, weights_layout
from lightning_tricks._trainer.saves import around_saves

PUBLIC = [getattr(lightning_tricks, name) for name in lightning_tricks.__all__ if name != "__version__"]
FILES = [vars(sys.modules[public.__module__]) for public in PUBLIC]
REFUSALS = {value for file in [vars(refusals), *FILES] for value in file.values() if isinstance(value, Refusal)}


class Data:
    micro_batch_size, seq_len = 4, 16


def test_a_plain_run_has_one_data_rank_no_scaler_and_the_batch_of_its_data():
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    assert (data_rank(trainer), loss_ranks(trainer), enabled_scaler(trainer.precision_plugin)) == ((0, 1), 1, None)
    assert (micro_batch(None), micro_batch(Data())) == ((None, None), (4, 64))


def test_the_scaler_of_fp16_is_a_fact_only_where_it_scales():
    plugin = FP16Mixed()
    assert enabled_scaler(plugin) is plugin.scaler is not None
    assert enabled_scaler(FP16Mixed(loss_scaling=False)) is None


@pytest.mark.parametrize(
    ("strategy", "layout"),
    [
        (SingleDeviceStrategy(torch.device("cpu")), "whole"),
        (DDPStrategy(), "whole"),
        (FSDP2Strategy(), "shards"),
        (ModelParallelStrategy(), "foreign shards"),
        (FSDPStrategy(), "flat"),
        (DeepSpeedZeROStrategy(), "engine"),
        (type("DeepSpeedStrategy", (), {})(), "foreign engine"),
    ],
)
def test_the_layout_of_the_weights_follows_from_the_strategy_and_decides_on_refusals(strategy, layout):
    assert weights_layout(strategy) == layout
    assert len(REFUSALS) >= 10
    for refusal in REFUSALS:
        if layout in refusal.layouts:
            with pytest.raises(UsageError, match=rf"^option: .*{type(strategy).__name__}"):
                refusal.check(strategy, "option:")
        else:
            refusal.check(strategy, "option:")


class Saves:
    """Stands for a Trainer: notes what happens around its save."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def save_checkpoint(self, filepath: str, weights_only: bool = False) -> str:
        self.events.append(f"save {filepath} {weights_only}")
        if filepath == "full":
            raise OSError("disk full")
        return "saved"

    def part(self, name: str):
        @contextmanager
        def weights():
            self.events.append(f"{name} in place")
            try:
                yield
            finally:
                self.events.append(f"{name} back")

        return around_saves(
            self,
            before_save=lambda path: self.events.append(f"{name} before {path}"),
            during_save=weights,
        )


def test_all_parts_of_a_save_come_in_one_order_and_the_latest_weights_change_first():
    saves = Saves()
    with saves.part("a"), saves.part("b"):
        assert saves.save_checkpoint("x", weights_only=True) == "saved"
    assert saves.events == [
        *("a before x", "b before x", "b in place", "a in place", "save x True"),
        *("a back", "b back"),
    ]


def test_the_trainers_own_save_comes_back_with_the_last_part_whoever_leaves_first():
    saves = Saves()
    first, second = saves.part("a"), saves.part("b")
    first.__enter__(), second.__enter__()
    first.__exit__(None, None, None)
    saves.save_checkpoint("x")
    assert saves.events == ["b before x", "b in place", "save x False", "b back"]
    second.__exit__(None, None, None)
    assert "save_checkpoint" not in vars(saves)


def test_a_save_that_fails_ends_every_part():
    saves = Saves()
    with saves.part("a"), pytest.raises(OSError, match="disk full"):
        saves.save_checkpoint("full")
    assert saves.events[-1] == "a back"


@pytest.mark.parametrize(
    ("question", "owners"),
    [
        (r"is_a\([^)]*[Ss]trategy|hasattr\([^)]*strategy|\.__name__ [=!]= \"\w*Strategy", ("_trainer/", "strategies/")),
        (r"replaced\([^)]*\"save_checkpoint\"", ("_trainer/saves.py",)),
    ],
)
def test_a_question_with_an_owner_is_asked_there_alone(question, owners):
    package = Path(lightning_tricks.__file__).parent
    files = {path.relative_to(package).as_posix(): path.read_text("utf-8") for path in package.rglob("*.py")}
    asked = {name for name, text in files.items() if re.search(question, text)}
    assert asked
    assert {name for name in asked if not name.startswith(owners)} == set()


def test_who_joins_values_over_ranks_takes_the_group_by_its_meaning():
    package = Path(lightning_tricks.__file__).parent
    joins = ("mixins", "metrics", "optim", "data", "precision", "models")
    files = [path for place in joins for path in (package / place).rglob("*.py")]
    files += [package / "guards" / f"{name}.py" for name in ("averaged_weights", "averages", "judging", "step_guard")]
    asked = [path for path in files if "world_size" in path.read_text("utf-8")]
    assert asked == []


@pytest.mark.parametrize(
    ("mesh", "data", "loss"),
    [
        (ParallelDims(), 4, 4),
        (ParallelDims(tensor=2), 2, 2),
        (ParallelDims(context=2), 2, 4),
        (ParallelDims(context=2, tensor=2), 1, 2),
    ],
)
def test_tensor_and_context_ranks_share_rows_and_context_ranks_have_tokens_of_their_own(mesh, data, loss):
    strategy = FSDP2Strategy(mesh=mesh)
    trainer = Trainer(accelerator="cpu", devices=4, strategy=strategy, logger=False, enable_checkpointing=False)
    assert (data_rank(trainer)[1], loss_ranks(trainer)) == (data, loss)
