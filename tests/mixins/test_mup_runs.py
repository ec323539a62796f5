"""MuP in a run: checkpoints, resumes, text and monitors know its multipliers; another base width is named."""

import lightning.pytorch as pl
import pytest
import torch
from harness.models import adamw
from harness.runs import fit
from torch import nn
from torch.utils.data import DataLoader

from lightning_tricks import LanguageModel, Llama, MuP, OptimizerMixin, WarmupLinear
from lightning_tricks._core.errors import UsageError
from lightning_tricks.checkpoints.open_checkpoint import load_file
from lightning_tricks.commands.generate import decoder_from_checkpoint

CONFIG = Llama(vocab_size=61, d_model=32, n_layers=2, n_heads=2, max_seq_len=16)
IDS = torch.randint(61, (4, 16), generator=torch.Generator().manual_seed(1))


def model(mup, config=CONFIG, **options):
    return LanguageModel(config, optimizer=adamw, schedule=WarmupLinear(warmup_steps=1), mup=mup, **options)


def data():
    return DataLoader([{"input_ids": IDS, "labels": IDS}] * 4, batch_size=None)


def resume(module, path):
    return fit(module, data=data(), ckpt_path=path).trainer


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of 2 of 4 steps, and its checkpoint."""
    path = tmp_path_factory.mktemp("mup") / "run.ckpt"
    pl.seed_everything(0, verbose=False)
    module = model(MuP(16, base_head_dim=8))
    run = fit(module, data=data(), limit_train_batches=2, max_epochs=1, log_every_n_steps=1)
    run.trainer.save_checkpoint(path)
    return module.eval(), run, path


def test_the_learning_rate_in_the_log_is_that_of_the_recipe(trained):
    _, run, _ = trained
    groups = run.trainer.optimizers[0].param_groups
    assert run.of("train/lr") == pytest.approx([0.01, 0.01])
    hidden = [group for group in groups if group["name"] == "decay:mup*0.5"]
    assert hidden[0]["lr"] == pytest.approx(groups[0]["lr"] / 2)
    assert hidden[0]["weight_decay"] == pytest.approx(0.2)


def test_a_resume_goes_on_with_the_same_and_names_another_base(trained):
    module, _, path = trained
    assert resume(model(module.mup), path).global_step == 4
    for other in (MuP(8, base_head_dim=8), MuP(16, base_head_dim=4), None):
        with pytest.raises(UsageError) as error:
            resume(model(other), path)
        assert f"mup=MuP(base_width=16, base_head_dim=8), the recipe has mup={other or 'null'}: " in str(error.value)
    with pytest.raises(UsageError, match="trained with mup=MuP"):
        model(None).check_weights(load_file(path, True))


def test_a_checkpoint_opens_as_the_model_that_it_was(trained):
    module, _, path = trained
    with torch.no_grad():
        expected = module(IDS)
        loaded = LanguageModel.load_from_checkpoint(path).eval()
        assert loaded.mup == module.mup
        torch.testing.assert_close(loaded(IDS), expected)
        torch.testing.assert_close(decoder_from_checkpoint(load_file(path, weights_only=True))(IDS), expected)
        assert not torch.allclose(expected, loaded(IDS) * 2)


def test_an_optimizer_without_a_rule_is_refused_before_the_data():
    module = LanguageModel(CONFIG, optimizer=torch.optim.Adagrad, mup=MuP(16))
    trainer = pl.Trainer(max_steps=2, logger=False, accelerator="cpu")
    with pytest.raises(UsageError, match="MuP has no rule for Adagrad"):
        module.check_run(trainer, None, "fit")


class Own(OptimizerMixin, pl.LightningModule):
    def __init__(self, width=32, **kwargs):
        super().__init__(**kwargs)
        self.save_hyperparameters()
        self.embed, self.net, self.head = nn.Embedding(61, width), nn.Linear(width, width), nn.Linear(width, 61)

    def base_shapes(self):
        return {name: param.shape for name, param in Own(self.mup.base_width).named_parameters()}

    def training_step(self, batch, _):
        logits = self.head(self.net(self.embed(batch["input_ids"]))) * (self.mup.base_width / 32)
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def test_any_module_trains_with_it_that_declares_its_shapes(tmp_path):
    module = Own(optimizer=adamw, mup=MuP(8))
    run = fit(module, data=data())
    lrs = {name: group["lr"] for group in run.trainer.optimizers[0].param_groups for name in group["param_names"]}
    assert lrs == {"embed.weight": 0.01, "net.weight": 0.0025, "net.bias": 0.01, "head.weight": 0.01, "head.bias": 0.01}
    run.trainer.save_checkpoint(tmp_path / "own.ckpt")
    checkpoint = load_file(tmp_path / "own.ckpt", weights_only=True)
    assert checkpoint["hyper_parameters"]["mup"]["init_args"]["base_width"] == 8
    assert Own.load_from_checkpoint(tmp_path / "own.ckpt").mup == MuP(8)
