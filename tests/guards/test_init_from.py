"""A new run starts from another checkpoint's weights, and from nothing else of it; a run that goes on keeps its own."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from harness.models import Small, adamw, batches
from harness.processes import run as run_processes
from harness.runs import same, trainer_with

from lightning_tricks import FSDP2Strategy, LanguageModel, Llama, ParallelDims
from lightning_tricks._core.errors import UsageError
from lightning_tricks.callbacks import InitFrom
from lightning_tricks.checkpoints import AtomicCheckpointIO


class Blocks(torch.nn.ModuleList):
    """Two layers, which FSDP2Strategy finds as blocks."""

    def forward(self, batch):
        return self[1](self[0](batch))


def net(width: int = 4, seed: int = 0) -> Small:
    torch.manual_seed(seed)
    blocks = Blocks(torch.nn.Linear(width, width) for _ in range(2))
    return Small(net=blocks, optimizer=adamw, data=batches(torch.ones(4, 2, 4)))


class Start(pl.Callback):
    """Keep the weights before the first step, and what was restored beside them."""

    def on_train_start(self, trainer, pl_module):
        gathered = [getattr(p, "full_tensor", lambda p=p: p)() for p in pl_module.parameters()]
        self.weights = [p.detach().clone() for p in gathered]
        self.step = trainer.global_step
        self.moments = [state for optimizer in trainer.optimizers for state in optimizer.state.values()]


def fit(folder, *callbacks, steps=2, seed=0, ckpt_path=None, strategy="auto", devices=1, module=None):
    """Train, and return what was there at the start and the trainer."""
    start = Start()
    options = {"enable_checkpointing": False, "default_root_dir": folder, "logger": False, "max_steps": steps}
    trainer = trainer_with(*callbacks, start, devices=devices, strategy=strategy, **options)
    if strategy in ("auto", "ddp"):
        trainer.strategy.checkpoint_io = AtomicCheckpointIO()
    trainer.fit(module or net(seed=seed), ckpt_path=ckpt_path)
    return start, trainer


@pytest.fixture
def source(tmp_path):
    """A checkpoint of two steps, and its weights."""
    _, trainer = fit(tmp_path, seed=1)
    trainer.save_checkpoint(tmp_path / "source.ckpt")
    return tmp_path / "source.ckpt", [p.detach().clone() for p in trainer.lightning_module.parameters()]


def test_a_new_run_has_the_weights_and_nothing_else(source, tmp_path, caplog):
    path, weights = source
    with caplog.at_level("INFO", logger="lightning.pytorch"):
        start, _ = fit(tmp_path, InitFrom(path), seed=2)
    assert same(start.weights, weights)
    assert (start.step, start.moments) == (0, [])
    (said,) = [record.getMessage() for record in caplog.records if "init_from" in record.getMessage()]
    left = "left out: the optimizer's state, the step and the position in the data"
    assert said == f"init_from={path}: 4 of its 4 weights loaded; {left}"


def test_a_run_that_goes_on_keeps_its_own_weights_and_says_so(source, tmp_path, caplog):
    path, weights = source
    _, trainer = fit(tmp_path, InitFrom(path), steps=3)
    trainer.save_checkpoint(tmp_path / "own.ckpt")
    own = [p.detach().clone() for p in trainer.lightning_module.parameters()]
    path.unlink()  # it is not needed any more
    with caplog.at_level("INFO", logger="lightning.pytorch"):
        start, _ = fit(tmp_path, InitFrom(path), steps=4, ckpt_path=tmp_path / "own.ckpt")
    assert same(start.weights, own)
    assert not same(own, weights)
    assert f"init_from={path}: not read, as the run resumes from {tmp_path / 'own.ckpt'}" in caplog.text


def test_a_module_may_refuse_and_every_line_names_the_option(source, tmp_path):
    path, _ = source
    module = net()
    module.check_weights = lambda checkpoint: (_ for _ in ()).throw(
        UsageError(f"not mine: {checkpoint['global_step']}")
    )
    with pytest.raises(UsageError, match=r"^init_from=.*source\.ckpt: not mine: 2"):
        fit(tmp_path, InitFrom(path), module=module)
    with pytest.raises(UsageError, match=r"^init_from=.*: 'net\.0\.weight' is \(4, 4\) in it and \(5, 5\) in the"):
        fit(tmp_path, InitFrom(path), module=net(5))
    with pytest.raises(UsageError, match=r"^init_from=no\.ckpt: there is no such file"):
        InitFrom("no.ckpt").check()
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed" / "zero_to_fp32.py").touch()
    with pytest.raises(UsageError, match=r"^init_from=.*consolidate"):
        InitFrom(tmp_path / "deepspeed").check()


def test_a_strategy_that_would_not_see_the_weights_is_refused_where_it_would_train():
    from lightning.pytorch.strategies import ModelParallelStrategy

    trainer = SimpleNamespace(strategy=ModelParallelStrategy())
    with pytest.raises(UsageError, match=r"^init_from=x: ModelParallelStrategy takes no weights from it"):
        InitFrom("x").setup(trainer, None, "fit")
    for stage in ("validate", "test", "predict"):
        InitFrom("x").setup(trainer, None, stage)  # nothing is loaded


def test_a_stage_takes_its_part_of_a_whole_file(tmp_path):
    dims, models = ParallelDims(pipeline=2).of_world(2), []
    for seed in (1, 2):
        torch.manual_seed(seed)
        models.append(LanguageModel(Llama(vocab_size=64, d_model=16, n_layers=2, n_heads=2, max_seq_len=8)))
        models[-1].configure_model()
    whole, stage = models
    torch.save(whole.state_dict(), tmp_path / "whole.ckpt")
    FSDP2Strategy(mesh=dims).cut_stages(stage, dims, 1)
    strategy = SimpleNamespace(load_model_state_dict=lambda found, strict: stage.load_state_dict(found["state_dict"]))
    line = InitFrom(tmp_path / "whole.ckpt")._load(SimpleNamespace(strategy=strategy), stage)
    assert "decoder.blocks.1.attn.q.weight" in stage.state_dict()
    assert all(torch.equal(value, whole.state_dict()[name]) for name, value in stage.state_dict().items())
    assert f"{len(stage.state_dict())} of its {len(stage.state_dict())} weights loaded" in line
    strategy.load_model_state_dict = None
    torch.save({**whole.state_dict(), "beside": torch.ones(1)}, tmp_path / "more.ckpt")
    with pytest.raises(UsageError, match="it has 'beside', which the model lacks"):
        InitFrom(tmp_path / "more.ckpt")._load(SimpleNamespace(strategy=strategy), stage)


def on_two_ranks(rank: int, folder: str, weights: list) -> list:
    from lightning_tricks.strategies import FSDP2Strategy

    path = Path(folder, "source.ckpt")
    strategy = FSDP2Strategy()
    start, trainer = fit(folder, InitFrom(path), strategy=strategy, devices=2, seed=2)
    assert same(start.weights, weights)
    assert (start.step, start.moments) == (0, [])
    trainer.save_checkpoint(Path(folder, "shards.ckpt"))
    after = [p.full_tensor().detach().clone() for p in trainer.lightning_module.parameters()]
    for kind in (FSDP2Strategy(), "ddp"):
        start, _ = fit(folder, InitFrom(Path(folder, "shards.ckpt")), strategy=kind, devices=2, seed=3)
        assert same(start.weights, after), kind
        assert (start.step, start.moments) == (0, [])
    return after


@pytest.mark.long
def test_shards_of_two_ranks_start_two_ranks_and_one(source, tmp_path):
    after, _ = run_processes(on_two_ranks, str(tmp_path), source[1])
    start, _ = fit(tmp_path, InitFrom(tmp_path / "shards.ckpt"), seed=4)
    assert same(start.weights, after)
    shutil.rmtree(tmp_path / "shards.ckpt")
