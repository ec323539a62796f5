"""ZeRO in one line: any module as one process would train it, and every wrong input told before anything waits.

All runs of two processes are made once, by `zero`, as DeepSpeed takes long to import; each test reads what it needs.
"""

import math
import os
import shutil
import sys
import traceback
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from foreign import CausalLM, language_model, rows, token_batches, train
from harness import processes, runs
from torch.utils.data import DataLoader

from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.tensors import whole_numel
from lightning_tricks.callbacks import BatchSizeWarmup, StepGuard
from lightning_tricks.checkpoints import AtomicCheckpointIO
from lightning_tricks.checkpoints.check_checkpoint import is_of_deepspeed
from lightning_tricks.checkpoints.record import damage, read_record
from lightning_tricks.cli import load_recipe
from lightning_tricks.commands import recipes_folder
from lightning_tricks.data.batches import IGNORED
from lightning_tricks.mixins import GradientClippingMixin
from lightning_tricks.models import GPT2, Llama
from lightning_tricks.optim import decay_groups
from lightning_tricks.precision import BF16True
from lightning_tricks.strategies import DeepSpeedZeROStrategy, consolidate_deepspeed
from lightning_tricks.strategies.consolidate_deepspeed import read_layout
from lightning_tricks.strategies.deepspeed_zero_strategy import fitting_sizes, load_deepspeed, refuse_settings

needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")
STAGES = pytest.mark.parametrize("stage", [1, 2, 3])
LATER = pytest.mark.parametrize("stage", [2, 3])  # 1 and 2 are of one class of DeepSpeed's
SHAPE = {"vocab_size": 64, "d_model": 32, "n_layers": 3, "n_heads": 2, "max_seq_len": 32}
# of two micro-batches and of one, in turns
IN_WINDOWS = {"accumulate_grad_batches": 2, "max_epochs": 3, "max_steps": 6}


class Sgd(CausalLM):
    """With SGD a wrong clip shows in the losses."""

    def configure_optimizers(self):
        return torch.optim.SGD(decay_groups(self, weight_decay=0.1), lr=0.5)


class Manual(CausalLM):
    """Steps by itself, after two backward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        losses = [self.model(input_ids=part, labels=part).loss / 2 for part in batch.chunk(2)]
        for loss in losses:
            self.manual_backward(loss)
        self.losses.append(sum(losses).item())
        optimizer.step()


class Decaying(CausalLM):
    """With a scheduler of torch's, a frozen embedding and a validation loss."""

    def __init__(self) -> None:
        super().__init__()
        self.model.model.embed_tokens.weight.requires_grad_(False)
        self.lrs: list[float] = []

    def configure_optimizers(self):
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=3e-3, fused=True)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def on_train_batch_start(self, *_):
        self.lrs.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    def validation_step(self, batch, batch_idx):
        self.log("loss", self.model(input_ids=batch, labels=batch).loss, sync_dist=True)


class Spoilt(Decaying):
    """Under StepGuard; its gradients are too large at one step and NaN at the next."""

    def configure_callbacks(self):
        return [StepGuard(window_steps=4, active_after_steps=2)]

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        factor = {2: 1e4, 3: math.nan}.get(self.global_step, 1.0)
        return loss.detach() + factor * (loss - loss.detach())


def ragged(rank=0, world=1):
    """Three batches whose rows end after 4 to 32 tokens, so that every micro-batch and rank has its own number."""
    full = list(token_batches(rank, world))[:3]
    for number, batch in enumerate(full):
        row = torch.arange(len(batch["labels"])) + rank * len(batch["labels"]) + 8 * number
        batch["labels"][torch.arange(32) >= 4 + (11 * row[:, None]) % 29] = IGNORED
    return DataLoader(full, batch_size=None)


def fit(model, strategy="auto", devices=1, data=None, ckpt_path=None, save=None, **options):
    """Ten steps, and each series of figures by its name."""
    options = {"max_steps": 10, "log_every_n_steps": 1, "use_distributed_sampler": False, **options}
    callbacks = options.pop("callbacks", [])
    torch.manual_seed(0)
    run = runs.fit(
        model, *callbacks, data=data, ckpt_path=ckpt_path, strategy=strategy, devices=devices, gradient_clip_val=0.8,
        **options,
    )  # fmt: skip
    if save:
        run.trainer.save_checkpoint(save)
    return {name: run.of(name) for name in run.names()}


def growing(world: int) -> dict[str, Any]:
    """Options of a run whose first steps have one micro-batch, and later ones two."""
    warmup = BatchSizeWarmup({0: world, 3: 2 * world}, lr_rule="sqrt")
    return {"accumulate_grad_batches": 2, "max_epochs": 3, "max_steps": 6, "callbacks": [warmup]}


def one_process() -> dict[str, Any]:
    """What the runs of two processes are compared with."""
    runs: dict[str, Any] = {"tokens": fit(language_model(), data=token_batches())}
    runs["ragged"] = fit(language_model(), data=ragged(), **IN_WINDOWS)
    runs["growing"] = fit(language_model(), data=ragged(), **growing(1))
    runs["tied"] = fit(language_model(config=GPT2(**SHAPE)), data=token_batches(), max_steps=3)["train/loss"]
    for name, model, options in (
        ("CausalLM", CausalLM(), {"gradient_clip_val": 0.3, "epochs": 4}),
        ("Sgd", Sgd(), {"gradient_clip_val": 0.3}),
        ("Manual", Manual(), {"gradient_clip_val": None}),
        ("window", CausalLM(), {"accumulate_grad_batches": 2, "epochs": 3}),  # an epoch's last window is of one batch
    ):
        train(model, **options)
        runs[name] = model.losses
    for model in (Decaying(), Spoilt()):
        train(model)
        runs[type(model).__name__] = (model.losses, model.lrs)
    return runs


def two_process_runs(rank: int, folder: str) -> None:
    """Every run, and what it gave, in a file of this rank; an error is a string."""
    os.environ.pop("PL_GLOBAL_SEED", None)
    os.environ["TORCH_EXTENSIONS_DIR"] = f"{folder}/extensions"
    results: dict[Any, Any] = {}

    def case(name: Any, run: Callable[[], Any]) -> None:
        try:
            results[name] = run()
        except UsageError as error:
            results[name] = f"UsageError: {error}"
        except Exception:
            results[name] = traceback.format_exc()
        torch.distributed.barrier()

    def mean(losses: list[float]) -> list[float]:
        total = torch.tensor(losses, dtype=torch.float64)
        torch.distributed.all_reduce(total)
        return (total / 2).tolist()

    def losses(model: Any, stage: int, offload: bool = False, **options: Any) -> tuple[list[float], pl.Trainer]:
        strategy = DeepSpeedZeROStrategy(stage, offload_optimizer=offload, offload_parameters=offload and stage == 3)
        trainer = train(model, **{"devices": 2, "strategy": strategy, "data": rows(rank, 2), **options})
        return mean(model.losses), trainer

    for stage in (1, 2, 3):
        stage_runs(case, losses, stage, rank, Path(folder))
    refused_runs(case, losses, Path(folder))
    saving_runs(case, losses, rank, Path(folder))
    results["compiled"] = Path(folder, "extensions").exists()
    torch.save(results, f"{folder}/results{rank}.pt")


def stage_runs(case: Any, losses: Any, stage: int, rank: int, folder: Path) -> None:
    def plain(model: Any, **options: Any) -> list[float]:
        return losses(model, stage, **{"gradient_clip_val": 0.3, **options})[0]

    def from_rank_0() -> list[float]:
        model = CausalLM()
        if rank:
            for parameter in model.parameters():
                parameter.data.zero_()
        return plain(model, epochs=4)

    def bf16(precision: str) -> dict[str, Any]:
        found, trainer = losses(CausalLM(), stage, precision=precision, gradient_clip_val=0.3)
        engine = trainer.strategy.deepspeed_engine
        return {
            "losses": found, "weights": {parameter.dtype for parameter in engine.module.parameters()},
            "state": {copy.dtype for copy in copies(trainer)},
            "reduced": engine.communication_data_type, "added": engine.get_data_types()[1],
        }  # fmt: skip

    def resumed(precision: str) -> dict[str, Any]:
        place = folder / f"{stage}-{precision}"
        whole, resumed, other = Decaying(), Decaying(), Decaying()
        _, first = losses(whole, stage, epochs=2, folder=place, precision=precision)
        kept, trained = state(first), [weight for weight in whole.parameters() if weight.requires_grad]
        figures = evaluated(first, whole) if precision == "32-true" else []
        again = {"epochs": 2, "precision": precision, "ckpt_path": place / "step=3.ckpt"}
        _, second = losses(resumed, stage, **again)
        _, third = losses(other, stage, gradient_clip_val=0.05, **again)
        same = kept.keys() == state(second).keys() and all(torch.equal(kept[k], v) for k, v in state(second).items())
        return {
            "losses": whole.losses, "resumed": resumed.losses, "lrs": whole.lrs, "resumed_lrs": resumed.lrs,
            "same_state": same, "clip": third.optimizers[0].clip_grad, "tensors": len(kept), "evaluated": figures,
            "held": sum(copy.numel() for copy in copies(first)) / sum(map(whole_numel, trained)),
        }  # fmt: skip

    def evaluated(trainer: pl.Trainer, model: Any) -> list[float]:
        found = [trainer.validate(model, rows(rank, 2), verbose=False)[0]["loss"]]
        for other in (stage, 1 if stage == 3 else 3):
            trainer = runs.trainer_with(devices=2, strategy=DeepSpeedZeROStrategy(other), use_distributed_sampler=False)
            path = folder / f"{stage}-32-true" / "step=6.ckpt"
            found.append(trainer.validate(Decaying(), rows(rank, 2), ckpt_path=path, verbose=False)[0]["loss"])
        return found

    def language(data: Any, model: Any = None, **options: Any) -> dict[str, list[float]]:
        return fit(model or language_model(), DeepSpeedZeROStrategy(stage), 2, data, **options)

    def tokens_resumed() -> dict[str, list[float]]:
        half = folder / f"half{stage}"
        language(token_batches(rank, 2), max_steps=5, save=half)
        return language(token_batches(rank, 2), language_model(lr=2e-2), ckpt_path=half)

    def tied() -> list[float]:
        return language(token_batches(rank, 2), language_model(config=GPT2(**SHAPE)), max_steps=3)["train/loss"]

    def spoilt() -> tuple[list[float], list[float]]:
        model = Spoilt()
        return losses(model, stage)[0], model.lrs

    case(("losses", stage), from_rank_0)
    case(("spoilt", stage), spoilt)
    case(("sgd", stage), lambda: plain(Sgd()))
    case(("manual", stage), lambda: plain(Manual(), gradient_clip_val=None))
    case(("window", stage), lambda: plain(CausalLM(), accumulate_grad_batches=2, epochs=3, gradient_clip_val=1.0))
    case(("bf16-mixed", stage), lambda: bf16("bf16-mixed"))
    for precision in ("32-true", "bf16-mixed"):
        case(("resumed", precision, stage), lambda: resumed(precision))  # noqa: B023
    case(("tokens", stage), lambda: language(token_batches(rank, 2), save=folder / f"lm{stage}"))
    case(("ragged", stage), lambda: language(ragged(rank, 2), **IN_WINDOWS))
    case(("growing", stage), lambda: language(ragged(rank, 2), **growing(2)))
    if stage > 1:
        case(("offload", stage), lambda: plain(CausalLM(), offload=True))
        case(("bf16-true", stage), lambda: bf16("bf16-true"))
        case(("tokens resumed", stage), tokens_resumed)
        case(("tied", stage), tied)


def copies(trainer: pl.Trainer) -> list[torch.Tensor]:
    """This process's part of the weights, as the optimizer steps them; each class of DeepSpeed's has its own name."""
    names = ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat")
    optimizer = trainer.optimizers[0]
    return next(list(getattr(optimizer, name)) for name in names if hasattr(optimizer, name))


def state(trainer: pl.Trainer) -> dict[str, torch.Tensor]:
    """This process's part of weights and optimizer state."""
    found = {f"{place}": copy.detach().clone() for place, copy in enumerate(copies(trainer))}
    for place, parameter in enumerate(trainer.strategy.deepspeed_engine.basic_optimizer.state.values()):
        found |= {f"{key} {place}": value.clone() for key, value in parameter.items() if torch.is_tensor(value)}
    return found


def refused_runs(case: Any, losses: Any, folder: Path) -> None:
    saved = folder / "2-32-true" / "step=3.ckpt"
    smaller = folder / "smaller"
    if not smaller.exists() and int(os.environ["RANK"]) == 0:
        shutil.copytree(saved, smaller)
        (smaller / "checkpoint" / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
        (smaller / "record.json").unlink()  # as in a folder of Lightning's own strategy
    torch.distributed.barrier()
    case("other stage", lambda: losses(Decaying(), 3, ckpt_path=saved))
    near = Decaying()
    case("near stage", lambda: losses(near, 1, ckpt_path=saved) and near.losses)
    case("other precision", lambda: losses(Decaying(), 2, ckpt_path=saved, precision="bf16-mixed"))
    case("other world", lambda: losses(Decaying(), 2, ckpt_path=smaller))
    case("two optimizers", lambda: losses(Two(), 2, gradient_clip_val=None))
    case("shapes", lambda: losses(Shaped(), 2))

    def other_model() -> None:
        trainer = runs.trainer_with(devices=2, strategy=DeepSpeedZeROStrategy(3))
        model = Decaying()
        model.model.lm_head = torch.nn.Linear(32, 65, bias=False)
        trainer.validate(model, rows(), ckpt_path=saved, verbose=False)

    case("other model", other_model)


def saving_runs(case: Any, losses: Any, rank: int, folder: Path) -> None:
    def background() -> list[float]:
        io = AtomicCheckpointIO(asynchronous=True)
        losses(Decaying(), 3, epochs=2, folder=folder / "background", plugin=io)
        resumed = Decaying()
        losses(resumed, 3, epochs=2, ckpt_path=folder / "background" / "step=3.ckpt")
        return resumed.losses

    case("background", background)
    damaged = folder / "damaged"
    if rank == 0:
        shutil.copytree(folder / "background" / "step=3.ckpt", damaged)
        file = damaged / "checkpoint" / "zero_pp_rank_1_mp_rank_00_model_states.pt"
        file.write_bytes(b"X" + file.read_bytes()[1:])
    torch.distributed.barrier()
    case("damaged", lambda: losses(Decaying(), 3, ckpt_path=damaged))


class Two(Manual):
    def configure_optimizers(self):
        return [torch.optim.SGD(self.parameters(), lr=0.1), torch.optim.SGD(self.parameters(), lr=0.1)]


class Shaped(CausalLM):
    def configure_optimizers(self):
        return torch.optim.Adafactor(self.parameters())


@pytest.fixture(scope="module")
def zero(tmp_path_factory):
    """What the two processes found, by case; a failure is raised where it is read."""
    pytest.importorskip("deepspeed")
    folder = tmp_path_factory.mktemp("zero")
    processes.run(two_process_runs, str(folder))
    results = [torch.load(folder / f"results{rank}.pt", weights_only=False) for rank in (0, 1)]

    def read(name: Any, refused: bool = False, rank: int = 0) -> Any:
        found = results[rank][name]
        if isinstance(found, str) and found.startswith(("Traceback", "UsageError")) and not refused:
            pytest.fail(f"{name}: {found}")
        return found

    read.folder = folder
    return read


@pytest.fixture(scope="module")
def one():
    return one_process()


def close(found, expected, tolerance=1e-5):
    assert len(found) == len(expected)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), atol=tolerance, rtol=0, check_dtype=False)


@STAGES
@pytest.mark.parametrize(
    ("case", "alone"), [("losses", "CausalLM"), ("sgd", "Sgd"), ("manual", "Manual"), ("window", "window")]
)
def test_losses_are_those_of_one_process_and_of_rank_0s_weights(zero, one, stage, case, alone):
    """In plain steps, with a clip that shows, after two backward passes, and where a window ends with the epoch."""
    close(zero((case, stage)), one[alone])


@STAGES
def test_a_step_that_the_guard_refuses_changes_no_weight_and_the_schedule_goes_on(zero, one, stage):
    losses, lrs = zero(("spoilt", stage))
    expected, expected_lrs = one["Spoilt"]
    close(losses, expected)
    assert lrs == expected_lrs
    assert expected != one["Decaying"][0]


@LATER
def test_what_is_offloaded_trains_alike(zero, one, stage):
    close(zero(("offload", stage)), one["CausalLM"][:6])


@pytest.mark.parametrize(
    ("precision", "stage"),
    [("bf16-mixed", 1), ("bf16-mixed", 2), ("bf16-mixed", 3), ("bf16-true", 2), ("bf16-true", 3)],
)
def test_bf16_trains_with_fp32_copies_and_fp32_sums(zero, one, stage, precision):
    found = zero((precision, stage))
    close(found["losses"], one["CausalLM"][:6], 2e-2)
    assert found["losses"][-1] < found["losses"][0] - 0.3
    assert found["weights"] == {torch.bfloat16}
    assert found["state"] == {torch.float32}
    assert (found["reduced"], found["added"]) == (torch.float32, torch.bfloat16 if stage == 1 else torch.float32)


@STAGES
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_resume_is_exact_and_takes_the_clip_of_the_recipe(zero, one, stage, precision):
    found = zero(("resumed", precision, stage))
    assert found["losses"][3:] == found["resumed"]
    assert found["tensors"] == 4  # weights, two moments and the step
    assert found["same_state"]
    assert found["lrs"] == one["Decaying"][1] == [3e-3, 3e-3, 1.5e-3, 1.5e-3, 7.5e-4, 7.5e-4]
    assert found["resumed_lrs"] == found["lrs"][3:]
    assert found["clip"] == 0.05
    assert found["held"] == pytest.approx(0.5, rel=0.01)  # of the weights in fp32, and so of the optimizer's state


@STAGES
def test_a_checkpoint_is_evaluated_under_any_stage(zero, stage):
    own, same, other = zero(("resumed", "32-true", stage))["evaluated"]
    assert own == pytest.approx(same, abs=1e-6)
    assert own == pytest.approx(other, abs=1e-6)


@STAGES
def test_a_language_model_logs_what_one_process_logs(zero, one, stage):
    found, expected = zero(("tokens", stage)), one["tokens"]
    assert found.keys() == expected.keys()
    for name in ("train/loss", "train/grad_norm", "train/lr", "train/clipped_fraction", "train/nonfinite_grad_norms"):
        close(found[name], expected[name])
    assert 0 < sum(expected["train/clipped_fraction"]) < 10  # both sides of the limit


@STAGES
@pytest.mark.parametrize("case", ["ragged", "growing"])
def test_the_mean_over_tokens_is_that_of_one_process_in_windows_of_any_length_and_number(zero, one, stage, case):
    found, expected = zero((case, stage)), one[case]
    for name in ("train/loss", "train/grad_norm"):
        assert len(expected[name]) == 6
        close(found[name], expected[name])
    if case == "growing":
        assert expected["train/batch_micro_batches"] == [1, 1, 1, 2, 2, 2]
        assert found["train/batch_micro_batches"] == [2, 2, 2, 4, 4, 4]


@STAGES
def test_the_flops_of_a_step_are_those_of_one_process(zero, one, stage):
    def per_step(figures, devices):
        rate, seconds = figures["throughput/model_flops_per_second"], figures["throughput/step_seconds"]
        return [devices * flops * time for flops, time in zip(rate, seconds, strict=True)]

    assert per_step(zero(("tokens", stage)), 2) == pytest.approx(per_step(one["tokens"], 1), rel=1e-6)


@LATER
def test_a_resume_with_another_lr_follows_the_recipe(zero, one, stage):
    expected = [2 * lr for lr in one["tokens"]["train/lr"][5:]]
    assert zero(("tokens resumed", stage))["train/lr"] == pytest.approx(expected)


@LATER
def test_tied_weights_train_as_one(zero, one, stage):
    close(zero(("tied", stage)), one["tied"])


@STAGES
def test_a_folder_becomes_one_file_of_its_weights(zero, stage):
    file = zero.folder / f"plain{stage}.ckpt"
    assert consolidate_deepspeed(zero.folder / f"{stage}-32-true" / "step=6.ckpt", file) == file
    assert not list(zero.folder.glob(".*.saving"))
    plain = torch.load(file, weights_only=True)
    fresh = Decaying()
    assert plain["state_dict"].keys() == fresh.state_dict().keys()
    assert not plain.keys() & {"optimizer_states", "optimizer", "module", "ds_config", "loops", "callbacks"}
    name = "model.model.embed_tokens.weight"  # frozen
    assert torch.equal(plain["state_dict"][name], fresh.state_dict()[name])
    trainer = runs.trainer_with()
    loss = trainer.validate(Decaying(), rows(), ckpt_path=file, verbose=False)[0]["loss"]
    assert loss == pytest.approx(zero(("resumed", "32-true", stage))["evaluated"][0], abs=1e-5)


@STAGES
def test_a_folder_is_there_when_it_is_whole_with_a_checksum_of_each_file(zero, stage):
    path = zero.folder / f"{stage}-32-true" / "step=6.ckpt"
    record = read_record(path)
    files = {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}
    assert set(record.checksums) == files - {"record.json"}
    assert {"latest", "zero_to_fp32.py"} < files
    assert record.step == 6
    assert damage(path, record) is None
    assert is_of_deepspeed(path)


def test_what_a_thread_wrote_resumes_as_what_was_written_at_once(zero):
    assert zero("background") == zero(("resumed", "32-true", 3))["resumed"]


def test_a_damaged_file_is_named_on_every_rank(zero):
    for rank in (0, 1):
        message = zero("damaged", refused=True, rank=rank)
        assert message.startswith("UsageError: damaged: ")
        assert "zero_pp_rank_1_mp_rank_00_model_states.pt has other bytes than were written" in message
        assert "\n" not in message
    with pytest.raises(UsageError, match=r"^damaged: [^\n]*zero_pp_rank_1_mp_rank_00_model_states\.pt"):
        consolidate_deepspeed(zero.folder / "damaged", zero.folder / "never.ckpt")
    assert not (zero.folder / "never.ckpt").exists()


def test_the_file_of_a_language_model_knows_its_architecture(zero):
    file = consolidate_deepspeed(zero.folder / "lm3", zero.folder / "new" / "lm.ckpt")
    assert torch.load(file, weights_only=True)["decoder_config"]["d_model"] == 32
    trainer = runs.trainer_with()
    other = language_model(config=Llama(**{**SHAPE, "n_layers": 2}))
    with pytest.raises(UsageError, match="n_layers"):
        trainer.test(other, token_batches(), ckpt_path=file, verbose=False)
    assert trainer.test(language_model(), token_batches(), ckpt_path=file, verbose=False)[0]["test/loss"] < 3


def test_half_precision_weights_become_fp32(zero):
    file = consolidate_deepspeed(zero.folder / "1-bf16-mixed" / "step=6.ckpt", zero.folder / "bf16.ckpt")
    assert {value.dtype for value in torch.load(file, weights_only=True)["state_dict"].values()} == {torch.float32}


def test_stage_1_and_2_open_each_others_checkpoints(zero):
    close(zero("near stage"), zero(("resumed", "32-true", 2))["resumed"])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("other stage", ["is of stage 1 or 2, this run of 3", "consolidate_deepspeed"]),
        ("other precision", ["is of precision fp32 or fp16, this run of bf16"]),
        ("other world", ["is of world size 1, this run of 2"]),
        ("two optimizers", ["gives 2 optimizers and 0 schedulers", "FSDP2Strategy"]),
        ("shapes", ["Adafactor needs the shapes"]),
        ("other model", ["'model.lm_head.weight' is (64, 32) in it and (65, 32) in the model"]),
    ],
)
def test_what_a_run_cannot_take_is_one_line_on_every_rank(zero, name, words):
    for rank in (0, 1):
        message = zero(name, refused=True, rank=rank)
        assert message.startswith("UsageError: ")
        assert "\n" not in message
        assert all(word in message for word in words)


def test_nothing_was_compiled(zero):
    assert not zero("compiled")


def refused(match, strategy=None, **options):
    """Told before there is a process group."""
    with pytest.raises(UsageError, match=match) as told:
        train(CausalLM(), options.pop("plugin", None), strategy=strategy or DeepSpeedZeROStrategy(2), **options)
    assert "\n" not in str(told.value)
    assert not torch.distributed.is_initialized()


def test_options_and_settings_that_deepspeed_has_not_are_refused():
    refused("stage=0: give 1, 2 or 3", DeepSpeedZeROStrategy(0))
    refused("offload_parameters=True with stage=2", DeepSpeedZeROStrategy(2, offload_parameters=True))
    refused(r"^plugins: BF16True does not work under DeepSpeedZeROStrategy, .*trainer\.precision", plugin=BF16True())
    refused("trainer.precision=16-mixed on a CPU", precision="16-mixed")
    refused("gradient_clip_algorithm=value", gradient_clip_algorithm="value")


@pytest.mark.long
@needs_deepspeed
def test_another_device_than_deepspeeds_is_refused(monkeypatch):
    accelerator = load_deepspeed().accelerator.get_accelerator()
    monkeypatch.setattr(accelerator, "device_name", lambda index=None: "cuda")
    refused("DS_ACCELERATOR=cpu")


def test_no_environment_variable_replaces_the_options_and_the_timeout_is_the_process_groups(monkeypatch, tmp_path):
    (tmp_path / "config.json").write_text('{"zero_optimization": {"stage": 1}}')
    monkeypatch.setenv("PL_DEEPSPEED_CONFIG_PATH", str(tmp_path / "config.json"))
    strategy = DeepSpeedZeROStrategy(3, timeout_seconds=60)
    assert strategy.config["zero_optimization"]["stage"] == 3
    assert strategy._timeout.total_seconds() == 60


def test_a_missing_package_is_one_line(monkeypatch):
    monkeypatch.delitem(sys.modules, "deepspeed", raising=False)
    monkeypatch.setattr(
        sys.modules["lightning_tricks.strategies.consolidate_deepspeed"], "find_spec", lambda name: None
    )
    refused("needs deepspeed: pip install", DeepSpeedZeROStrategy(2))


def test_a_package_that_does_not_import_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(UsageError, match=r"does not import \(.*deepspeed.*\).*--force-reinstall"):
        load_deepspeed()


def test_folders_that_are_no_whole_checkpoint_are_refused(tmp_path):
    def told(path):
        with pytest.raises(UsageError) as error:
            read_layout(path)
        assert "\n" not in str(error.value)
        return str(error.value)

    (tmp_path / "plain.ckpt").touch()
    assert "load_from_checkpoint" in told(tmp_path / "plain.ckpt")
    parts = tmp_path / "run" / "checkpoint"
    parts.mkdir(parents=True)
    assert "not one inside it" in told(parts)
    (parts / "zero_pp_rank_0_mp_rank_00_optim_states.pt").touch()
    assert "not written to its end" in told(tmp_path / "run")
    (tmp_path / "run" / "latest").touch()
    assert read_layout(tmp_path / "run").world_size == 1
    with pytest.raises(UsageError, match=rf"{tmp_path} is a folder: give the name of a file$"):
        consolidate_deepspeed(tmp_path / "run", tmp_path)


def test_options_of_a_store_are_refused(tmp_path):
    line = r"^storage_options={'key': 1}: DeepSpeed writes to a file system and takes no"
    with pytest.raises(UsageError, match=line):
        DeepSpeedZeROStrategy().save_checkpoint({}, tmp_path / "run.ckpt", storage_options={"key": 1})


def test_a_device_that_is_neither_a_gpu_of_nvidia_nor_a_cpu_is_refused():
    strategy = DeepSpeedZeROStrategy()
    strategy._parallel_devices = [torch.device("mps")]
    line = "trainer.accelerator=mps: DeepSpeedZeROStrategy runs on cuda and cpu; use FSDP2Strategy"
    with pytest.raises(UsageError, match=f"^{line}$"):
        refuse_settings(strategy, SimpleNamespace(gradient_clip_val=None))


class Clips(CausalLM):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm):
        raise AssertionError("the engine clips")


def test_a_clip_of_the_modules_own_is_warned_of_and_the_mixins_is_not(monkeypatch, recwarn):
    monkeypatch.setattr(DeepSpeedZeROStrategy, "_initialize_deepspeed_train", lambda self, module: None)
    for cls in (Clips, type("Mixed", (GradientClippingMixin, CausalLM), {})):
        strategy, module = DeepSpeedZeROStrategy(), cls()
        strategy._lightning_module, module._trainer = module, SimpleNamespace(training=True)
        strategy.init_deepspeed()
    said = [str(warning.message) for warning in recwarn if "engine" in str(warning.message)]
    line = "Clips.configure_gradient_clipping has no effect under DeepSpeed: its engine clips, by"
    assert said == [f"{line} trainer.gradient_clip_val"]


def test_small_models_get_small_buffers_and_shard_all_their_matrices():
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Embedding(1_000_000, 4))
    sizes = fitting_sizes(model)
    assert sizes["reduce_bucket_size"] == sizes["allgather_bucket_size"] == (32 + 4 + 4_000_000) // 16
    assert sizes["stage3_param_persistence_threshold"] == 4
    assert fitting_sizes(torch.nn.Linear(2, 2))["reduce_bucket_size"] == 16_384
    with torch.device("meta"):
        large = torch.nn.Linear(100_000, 100_000)
    assert fitting_sizes(large)["reduce_bucket_size"] == 200_000_000


def test_a_recipe_is_read_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    _, _, trainer = load_recipe("--config", str(recipes_folder() / "llama7b_deepspeed.yaml"))
    assert (trainer["strategy"].stage, trainer["precision"]) == (3, "bf16-mixed")
