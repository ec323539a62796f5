"""docs/resume_with_changes.md: each row of its tables is a resume that was tried, here or in the test that is named."""

import logging
import re
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from harness.models import Small
from harness.runs import fit, weights_of
from harness.token_files import write_token_files
from lightning.pytorch import Callback, seed_everything

import lightning_tricks as lt
from lightning_tricks._core.errors import UsageError

pytestmark = pytest.mark.pages

TESTS = Path(__file__).resolve().parent
PAGE = (TESTS.parent / "docs/resume_with_changes.md").read_text(encoding="utf-8")
SAVED, STEPS = 4, 8
JUMP = "lr is .*, and was .* in the checkpoint's run: .*; the recipe's values are used"
OTHER_DATA = "other data settings"


class Refused(NamedTuple):
    """A resume that ends with this line."""

    options: dict
    line: str


class GoesOn(NamedTuple):
    """A resume that trains to the end."""

    options: dict
    line: str = ""  # that it says, of which an unchanged resume says nothing
    lr: float = 0.02 * 2 / 3  # at its first step
    rows: bool = True  # the same ones in each step
    weights: bool = True  # at the end equal to the bit to those of the run without a stop
    steps: int = STEPS  # its last one


def adamw(lr=0.02, cls=torch.optim.AdamW, **settings):
    return partial(cls, lr=lr, **settings)


def shape(**changed):
    return {"decoder": lt.Llama(**{"vocab_size": 64, "d_model": 16, "n_layers": 2, "n_heads": 2, **changed})}


LINEAR = lt.WarmupLinear(warmup_steps=2)
HERE = {
    "nothing": GoesOn({}),
    # optimizer and schedule
    "learning rate, `--model.optimizer.lr`": GoesOn({"optimizer": adamw(0.04)}, JUMP, lr=0.04 * 2 / 3, weights=False),
    "schedule": GoesOn({"schedule": lt.WarmupConstant(warmup_steps=2)}, JUMP, lr=0.02, weights=False),
    "more `max_steps`": GoesOn({"max_steps": 16}, JUMP, lr=0.02 * 12 / 14, rows=False, weights=False, steps=16),
    "`max_steps` that are reached": GoesOn({"max_steps": 3}, rows=False, weights=False, steps=SAVED),
    "betas, eps": GoesOn({"optimizer": adamw(betas=(0.5, 0.5))}, weights=False),
    "weight decay": GoesOn({"weight_decay": 0.5}, weights=False),
    "`gradient_clip_val`": GoesOn({"gradient_clip_val": 0.01}, weights=False),
    "class of the optimizer": Refused({"optimizer": adamw(cls=torch.optim.SGD)}, "holds the state of AdamW, which SGD"),
    "`param_rules`, `decay_embeddings`": Refused(
        {"decay_embeddings": False}, "resume with the model, decay_embeddings"
    ),
    "`freeze`": Refused({"freeze": ["embed"]}, "trained 'decoder.embed.weight', and this one does not"),
    "`mup`": Refused({"mup": lt.MuP(base_width=8)}, "trained with mup=null"),
    # data
    "`micro_batch_size` and accumulation, the same product": GoesOn(
        {"micro_batch_size": 2, "accumulate_grad_batches": 2}, weights=False
    ),
    "rows in a step": GoesOn({"micro_batch_size": 8}, "From step 4 on, a step has 8 rows", rows=False, weights=False),
    "`seq_len`": GoesOn({"seq_len": 8, **shape(max_seq_len=16)}, OTHER_DATA, rows=False, weights=False),
    "other files, or text": GoesOn({"files": "other"}, OTHER_DATA, rows=False, weights=False),
    "`seed` of the data": GoesOn({"seed": 5}, OTHER_DATA, rows=False, weights=False),
    "`shuffle`": GoesOn({"shuffle": "documents", "eot_id": 0}, OTHER_DATA, rows=False, weights=False),
    "`num_workers`": GoesOn({"num_workers": 1}),
    # model
    "`seed_everything`": GoesOn({"of_all": 5}),
    "width, layers, heads, family": Refused(
        shape(d_model=32, n_layers=1),
        "has d_model=16, n_layers=2, the recipe's 32, 1: give the decoder d_model=16, n_l",
    ),
    "`vocab_size`": Refused(shape(vocab_size=128), "has vocab_size=64, the recipe's 128"),
    "`max_seq_len`, `rope_theta`": Refused(
        shape(max_seq_len=32), "16, the recipe's 32: give the decoder max_seq_len=16"
    ),
    "`z_loss`": GoesOn({"z_loss": 0.1}, weights=False),
    "`logit_softcap`": Refused(shape(logit_softcap=15.0), "has logit_softcap=None, the recipe's 15.0"),
    "`init_std`, `zero_init_outputs`": GoesOn(shape(init_std=0.5)),
    "`activation_checkpointing`": GoesOn({"activation_checkpointing": {"budget": 0.3}}),
    # devices
    "precision": GoesOn({"plugins": [lt.BF16True()]}, weights=False),
    "strategy": GoesOn({"strategy": "ddp"}),
    # callbacks
    "`StepGuard`, or a monitor": GoesOn({"callbacks": [lt.StepGuard(), lt.MemoryMonitor()]}),
    "`EMA`, `TailAverage`": GoesOn({"callbacks": [lt.EMA()]}, "holds no average: it begins with the weights"),
    "`log_every_n_steps`, validation": GoesOn({"log_every_n_steps": 3, "limit_val_batches": 1}),
}
ELSEWHERE = {
    "settings of an optimizer that the module makes itself": "test_resume_with_changes.py::"
    "test_a_module_that_makes_its_optimizer_itself_goes_on_with_the_settings_of_the_checkpoint",
    "`fused_projections`": "test_resume_with_changes.py::"
    "test_a_resume_with_fused_projections_is_the_same_run_but_for_rounding",
    "weights of a mixture, its sources": "data/test_mixture_data.py::"
    "test_changed_weights_and_sources_hold_from_the_resume_on_and_no_row_comes_twice_or_is_lost",
    "number of devices": "mixins/test_run_length.py::"
    "test_two_ranks_end_together_and_a_resume_on_one_ends_with_its_own_last_step",
    "number of devices, with `--elastic true`": "test_elastic_launching.py::"
    "test_the_rows_of_every_step_are_those_of_the_unbroken_run",
    "`total_tokens`": "guards/test_total_tokens.py::"
    "test_a_resume_with_more_tokens_goes_on_and_one_with_fewer_ends_at_once",
}
TABLES = dict(re.findall(r"^\| (?!changed )(?!-)(.+?) \| (.+) \|$", PAGE, re.M))


class Watch(Callback):
    """Keeps the rows and the learning rate of each step, and saves after some."""

    def __init__(self, path: Path | None = None) -> None:
        self.path, self.lr, self.rows = path, [], {}

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.rows.setdefault(trainer.global_step, []).extend(batch["input_ids"][:, 0].tolist())

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.lr.append(optimizer.param_groups[0]["lr"])

    def on_train_batch_end(self, trainer, *_):
        if self.path is not None and trainer.global_step == SAVED:
            trainer.save_checkpoint(self.path)


def train(folder: Path, ckpt_path=None, *, save=None, files="files", callbacks=(), of_all=0, **options):
    """A run of a small LanguageModel; options go to the model, the data or the Trainer, by their names."""
    seed_everything(of_all, verbose=False)
    of_model = ("decoder", "optimizer", "schedule", "weight_decay", "decay_embeddings", "freeze", "mup")
    of_data = ("micro_batch_size", "seq_len", "seed", "num_workers", "shuffle", "eot_id")
    given = [
        {name: options.pop(name) for name in names if name in options}
        for names in ((*of_model, "activation_checkpointing", "fused_projections", "z_loss"), of_data)
    ]
    model = lt.LanguageModel(**{**shape(), "optimizer": adamw(), "schedule": LINEAR, **given[0]})
    paths = {name: str(folder / files / f"{name}.bin") for name in ("train", "val")}
    data = lt.TokenData(**paths, **{"seq_len": 16, "micro_batch_size": 4, **given[1]})
    watch = Watch(save)
    settings = {"max_steps": STEPS, "limit_val_batches": 0, "log_every_n_steps": 1, **options}
    run = fit(model, watch, *callbacks, data=data, ckpt_path=ckpt_path, **settings)
    return run.trainer, watch, weights_of(model)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The run without a stop, and its checkpoint of half the way."""
    folder = tmp_path_factory.mktemp("runs")
    write_token_files(folder / "files")
    write_token_files(folder / "other", train=3600)
    _, watch, weights = train(folder, save=folder / "a.ckpt")
    return folder, watch.rows, weights


@pytest.mark.filterwarnings("ignore:The dataloader")
@pytest.mark.parametrize("name", HERE)
def test_a_resume_with_a_changed_setting_does_what_the_page_says(name, saved, caplog, recwarn):
    caplog.set_level(logging.INFO)
    folder, rows, weights = saved
    case = HERE[name]
    if isinstance(case, Refused):
        with pytest.raises(UsageError, match=case.line):
            train(folder, folder / "a.ckpt", **case.options)
        return
    trainer, watch, trained = train(folder, folder / "a.ckpt", **case.options)
    lines = [caplog.text, *(str(one.message) for one in recwarn)]
    said = [pattern for pattern in (JUMP, "From step .* rows", OTHER_DATA) if any(re.search(pattern, x) for x in lines)]
    assert not said or case.line
    assert any(re.search(case.line, line) for line in lines)
    assert trainer.global_step == case.steps
    if case.steps > SAVED:
        assert watch.lr[0] == pytest.approx(case.lr)
    assert (watch.rows == {step: rows[step] for step in range(SAVED, STEPS)}) == case.rows
    assert all(map(torch.equal, trained, weights)) == case.weights


def test_a_resume_with_fused_projections_is_the_same_run_but_for_rounding(saved):
    folder, rows, weights = saved
    trainer, watch, trained = train(folder, folder / "a.ckpt", fused_projections=True)
    assert trainer.global_step == STEPS
    assert watch.rows == {step: rows[step] for step in range(SAVED, STEPS)}
    for own, expected in zip(trained, weights, strict=True):  # an AdamW step of sums in another order
        torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-5)


def test_a_module_that_makes_its_optimizer_itself_goes_on_with_the_settings_of_the_checkpoint(tmp_path):
    first = fit(Small(optimizer=adamw(0.02)), max_steps=2)
    first.trainer.save_checkpoint(tmp_path / "a.ckpt")
    second = fit(Small(optimizer=adamw(0.04)), max_steps=4, ckpt_path=tmp_path / "a.ckpt")
    assert [group["lr"] for group in second.trainer.optimizers[0].param_groups] == [0.02]


def test_the_page_has_each_row_and_says_what_is_refused():
    assert sorted(TABLES) == sorted([*HERE, *ELSEWHERE])
    refused = {name for name, case in HERE.items() if isinstance(case, Refused)}
    assert {name for name, text in TABLES.items() if text.startswith("**refused**")} == refused


@pytest.mark.parametrize("place", ELSEWHERE.values())
def test_the_tests_of_the_other_rows_exist(place):
    file, _, name = place.partition("::")
    assert f"def {name}(" in (TESTS / file).read_text(encoding="utf-8")
