"""autopsy: the batch of a step is the one that the run took, and a planted corrupt document comes first."""

import json
import math
import shutil
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import yaml
from cli.parsers import one_parser  # noqa: F401, a fixture
from harness.processes import run
from harness.runs import On, fit

from lightning_tricks import LanguageModel, Llama, TextData, TokenData
from lightning_tricks import __main__ as door
from lightning_tricks._core.errors import UsageError
from lightning_tricks._trainer.lightning import pl
from lightning_tricks.checkpoints.load_weights import load_weights
from lightning_tricks.commands.autopsy import autopsy, documents_of, joined, rows_of
from lightning_tricks.data import ShardWriter
from lightning_tricks.data.shards import HEADER_INTS, TokenStream

pytestmark = pytest.mark.long  # the run is one of two processes
DECODER = {"vocab_size": 300, "d_model": 32, "n_layers": 2, "n_heads": 2, "max_seq_len": 64}
TWO, ALL = 16, 26  # steps of two processes, of 8 rows each; then up to this step one process, of 6 rows each
SAVED = (12, 16, 22, 26)
CHECKPOINTS = "runs/test/version_0/checkpoints"


def text_data(folder: Path) -> TextData:
    settings: dict[str, Any] = {"seq_len": 64, "micro_batch_size": 2, "vocab_size": 300, "val_fraction": 0.02}
    return TextData(str(folder / "text"), cache_dir=str(folder / "cache"), seed=3, **settings)


def model() -> LanguageModel:
    return LanguageModel(Llama(**DECODER), optimizer=partial(torch.optim.AdamW, lr=1e-2, betas=(0.9, 0.95)))


def train(folder: Path, steps: int, ckpt_path: Any = None, **options: Any) -> tuple[Any, list[Any]]:
    """Train and save checkpoints; returns the logged loss by step, and the rows of each step on this rank."""
    taken: list[Any] = []

    def save(trainer: Any, *_: Any) -> None:
        path = folder / CHECKPOINTS / f"step={trainer.global_step}.ckpt"
        if trainer.global_step in SAVED and not path.exists():
            trainer.save_checkpoint(path)

    note = lambda trainer, module, batch, _: taken.append((trainer.global_step, batch["input_ids"].tolist()))  # noqa: E731
    pl.seed_everything(0, verbose=False)
    run = fit(
        model(), On(on_train_batch_start=note, on_train_batch_end=save), data=text_data(folder), ckpt_path=ckpt_path,
        max_steps=steps, limit_val_batches=0, log_every_n_steps=4, **options,
    )  # fmt: skip
    return run.at("train/loss"), taken


def train_rank(rank: int, folder: Path) -> tuple[Any, list[Any]]:
    return train(folder, TWO, devices=2, strategy="ddp", accumulate_grad_batches=2)


def positions(runs: Any) -> list[int]:
    return [sample for first, last in runs for sample in range(first, last + 1)]


class Run(NamedTuple):
    folder: Path
    rows: dict[int, set[tuple[int, ...]]]  # input_ids of each step, of all ranks
    logged: dict[int, float]  # train/loss of each step

    def checkpoint(self, step: int) -> Path:
        return self.folder / CHECKPOINTS / f"step={step}.ckpt"

    def report(self, step: int, saved: int | Path, **options: Any) -> Any:
        """By the run's own checkpoint of a step, or another one."""
        path = self.checkpoint(saved) if isinstance(saved, int) else saved
        return autopsy(model(), text_data(self.folder), path, step, **options)

    def rows_of_all(self) -> Any:
        data = text_data(self.folder)
        data.setup()
        return data, data.training_rows()

    def batch(self, report: Any) -> Any:
        """The whole batch of a step, and where the first document is."""
        document, samples = report.documents[0].document, positions(report.samples.runs)
        _, rows = self.rows_of_all()
        whole = joined([rows[sample] for sample in samples], torch.device("cpu"))
        return whole, (samples.index(document.sample), slice(document.first, document.stop))

    @property
    def shard(self) -> Path:
        (shard,) = self.folder.glob("cache/*/train_000000.bin")
        return shard


@pytest.fixture(scope="module")
def trained(tmp_path_factory, text_file) -> Run:
    """A run of two processes that accumulate two micro-batches, resumed in one that accumulates three."""
    folder = tmp_path_factory.mktemp("autopsy")
    texts = [text for text in Path(text_file).read_text().split("\n\n") if len(text) > 20]
    (folder / "text").mkdir()
    for name, part in (("a", texts[::2]), ("b", texts[1::2])):
        (folder / "text" / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in part))
    text_data(folder).prepare_data()
    (first, taken), (_, of_rank_1) = run(train_rank, folder)
    then, of_one = train(folder, ALL, folder / CHECKPOINTS / f"step={TWO}.ckpt", accumulate_grad_batches=3)
    rows: dict[int, set[tuple[int, ...]]] = {}
    for step, batch in [*taken, *of_rank_1, *of_one]:
        rows.setdefault(step, set()).update(map(tuple, batch))
    return Run(folder, rows, first | then)


def test_the_batch_of_each_step_is_the_one_that_the_run_took(trained):
    data, rows = trained.rows_of_all()
    for saved in SAVED:
        state = torch.load(trained.checkpoint(saved), weights_only=True)["TextData"]
        for step in range(saved if saved <= TWO else ALL):
            taken = positions(data.samples_of_step(step, state))
            assert len(taken) == (8 if step < TWO else 6)
            assert {tuple(rows[sample]["input_ids"][0].tolist()) for sample in taken} == trained.rows[step]


@pytest.mark.parametrize("step", [12, 16, 22])  # of two processes; the first after the change; the seventh
def test_the_loss_of_the_batch_is_the_one_that_the_run_logged(trained, step):
    report = trained.report(step, step)
    assert report.loss == pytest.approx(trained.logged[step], rel=1e-5)
    assert "the step began with them" in report.table(0)


def plant(run: Run, step: int, seed: int) -> tuple[int, int]:
    """Random tokens in place of a document of a step's batch; returns its row's sample position and its first token."""
    random = np.random.default_rng(seed)
    clean = trained_documents(run, step)
    document = clean[random.integers(len(clean))]
    shard = np.memmap(run.shard, dtype="<u2", mode="r+", offset=4 * HEADER_INTS)
    end = document.token + document.tokens - int(document.ids[-1] == 0)  # its end-of-text token stays
    length = end - document.token
    shard[document.token : end] = random.integers(1, 300, length)
    shard.flush()
    return document.sample, document.first


def trained_documents(run: Run, step: int) -> list[Any]:
    """The documents of a step's batch that have at least 8 tokens."""
    data, rows = run.rows_of_all()
    state = torch.load(run.checkpoint(ALL), weights_only=True)["TextData"]
    samples, batches = rows_of(rows, data.samples_of_step(step, state))
    return [document for document in documents_of(rows, samples, batches, data.eot_id) if document.tokens > 8]


@pytest.fixture
def shard(trained, tmp_path):
    """Puts the shard back."""
    shutil.copyfile(trained.shard, tmp_path / "clean.bin")
    yield lambda: shutil.copyfile(tmp_path / "clean.bin", trained.shard)
    shutil.copyfile(tmp_path / "clean.bin", trained.shard)


def test_a_planted_corrupt_document_comes_first_before_and_after_a_change_of_world_size(trained, shard):
    found = []
    for seed, step in enumerate(range(TWO - 5, TWO + 5)):
        planted = plant(trained, step, seed)
        first = trained.report(step, (TWO, ALL)[seed % 2]).documents[0].document
        found.append((first.sample, first.first) == planted)
        shard()
    assert found == [True] * 10


def test_a_document_s_loss_is_that_of_its_tokens_in_the_batch_and_the_highest_comes_first(trained):
    report = trained.report(12, 12)
    whole, place = trained.batch(report)
    labels = torch.full_like(whole["labels"], -100)
    labels[place] = whole["labels"][place]
    nats, tokens = loaded(trained.checkpoint(12)).token_sums({**whole, "labels": labels})
    assert report.documents[0].loss == pytest.approx(float(nats / tokens), rel=1e-5)
    losses = [each.loss for each in report.documents]
    assert losses == sorted(losses, reverse=True)


def loaded(path: Path) -> LanguageModel:
    module = model()
    module.configure_model()
    load_weights(module, path)
    return module


def test_documents_whose_loss_is_not_finite_come_first(trained, tmp_path):
    clean = trained.report(11, 12)
    token = next(  # one that a single document of the batch reads
        token for token in range(1, 300) if sum(token in found.document.ids for found in clean.documents) == 1
    )
    content = torch.load(trained.checkpoint(12), weights_only=True)
    content["state_dict"]["decoder.embed.weight"][token] = math.inf
    torch.save(content, tmp_path / "broken.ckpt")
    report = trained.report(11, tmp_path / "broken.ckpt")
    finite = [math.isfinite(found.loss) for found in report.documents]
    assert finite == sorted(finite)
    assert set(finite) == {False, True}
    assert any(token in found.document.ids for found in report.documents[: finite.count(False)])
    written = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert written["documents"][0]["loss"] is written["loss"] is None


def test_each_document_is_found_in_its_shard_and_its_file(trained):
    report = trained.report(16, 22)
    data, _ = trained.rows_of_all()
    for finding in report.documents:
        path, index = finding.shard
        tokens = np.fromfile(path, dtype="<u2", offset=4 * HEADER_INTS)[index : index + finding.document.tokens]
        assert tokens.tolist() == finding.document.ids.tolist()
        text = data.tokenizer.decode(tokens.tolist())
        with finding.file.open() as file:
            assert any(text in json.loads(line)["text"] for line in file)
    assert {finding.file.name for finding in report.documents} == {"a.jsonl", "b.jsonl"}


@pytest.fixture
def recipe(trained, one_parser, monkeypatch) -> list[str]:  # noqa: F811
    """The command line of a recipe that trains as the run has."""
    monkeypatch.chdir(trained.folder)
    decoder = {"class_path": "Llama", "init_args": DECODER}
    init_args = {"files": "text", "cache_dir": "cache", "seq_len": 64, "micro_batch_size": 2, "vocab_size": 300}
    settings = {
        "model": {"class_path": "LanguageModel", "init_args": {"decoder": decoder}},
        "data": {"class_path": "TextData", "init_args": {**init_args, "val_fraction": 0.02, "seed": 3}},
        "trainer": {
            "accelerator": "cpu", "devices": 64, "strategy": "ddp", "max_steps": ALL,
            "callbacks": ["MemoryMonitor"],
            "logger": {"class_path": "ResumingCSVLogger", "init_args": {"save_dir": "runs", "name": "test"}},
        },
    }  # fmt: skip
    (trained.folder / "recipe.yaml").write_text(yaml.safe_dump(settings))
    return ["autopsy", "--config", "recipe.yaml"]


def test_the_command_prints_the_first_and_writes_all(trained, recipe, shard, tmp_path, capsys):
    sample, first = plant(trained, 22, 0)
    door.run([*recipe, "--ckpt_path", "last", "--step", "22", "--top", "2", "--json", str(tmp_path / "all.json")])
    printed = capsys.readouterr().out
    written = json.loads((tmp_path / "all.json").read_text())
    place = f"sample {sample}, tokens {first + 1} to "
    # 128 + 6 * 6 is the first sample
    assert printed.startswith("step 22 took the samples 164 to 169: 6 rows, ")
    assert f"{CHECKPOINTS}/step=26.ckpt, of step 26: 4 steps after the step began" in printed
    assert printed.count("sample ") == 2
    assert place in printed.split("   2 ")[0]
    assert len(written["documents"]) > 6
    assert written["documents"][0]["sample"] == sample
    assert sum(document["tokens"] for document in written["documents"]) == 6 * 64
    losses = [document["loss"] for document in written["documents"]]
    assert losses == sorted(losses, reverse=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--step 12", r"^autopsy needs a checkpoint: give --ckpt_path FILE, or --ckpt_path last for"),
        ("--ckpt_path last --step 1 --top -1", r"^top=-1: give the number of documents"),
        ("--ckpt_path last --step 1 --json no/all.json", r"^autopsy: json=no/all.json: there is no such folder"),
        ("--ckpt_path last --step -1", r"^step=-1: .* from step 0 on \(as the logs count\)"),
        ("--ckpt_path last --step 26", r"^step=26: the run ends with step 25, counted from 0 \(trainer.max_steps=26\)"),
        ("--ckpt_path last --step 12 --data.seed 4", r"other data settings \(seed 3 -> 4\): give the recipe"),
        ("--ckpt_path last --step 12 --model.decoder.d_model 64", r"the checkpoint's decoder has d_model=32"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(recipe, options, message):
    with pytest.raises(UsageError, match=message) as raised:
        door.run([*recipe, *options.split()])
    assert "\n" not in str(raised.value)


def changed(trained: Run, tmp_path: Path, **entries: Any) -> Path:
    content = torch.load(trained.checkpoint(12), weights_only=True) | entries
    torch.save({key: value for key, value in content.items() if value is not None}, tmp_path / "changed.ckpt")
    return tmp_path / "changed.ckpt"


def test_modules_data_and_checkpoints_that_lack_something_are_refused(trained, tmp_path):
    data = text_data(trained.folder)
    bare = TokenData(str(trained.shard), seq_len=64, micro_batch_size=2, seed=3, eot_id=0)
    cases = [
        (pl.LightningModule(), data, {}, "model=LightningModule is no LanguageModel"),
        (model(), None, {}, "data=none: its batches have no sample positions"),
        (model(), bare, {}, "it holds no state of TokenData"),
        (model(), data, {"TextData": None}, "it holds no state of TextData"),
        (model(), data, {"decoder_config": None}, "it holds no decoder"),
    ]
    for module, given, entries, message in cases:
        with pytest.raises(UsageError, match=message):
            autopsy(module, given, changed(trained, tmp_path, **entries), 5)


def test_a_step_that_no_checkpoint_has_done_is_that_of_a_run_that_goes_on_unchanged(trained, tmp_path):
    alone = shutil.copy(trained.checkpoint(12), tmp_path / "alone.ckpt")
    report = trained.report(16, alone)
    assert report.samples.runs == [(128, 135)]
    assert "the samples are those of a run that continues with the global batch of this checkpoint" in report.table(0)
    (tmp_path / "damaged.ckpt").write_bytes(trained.checkpoint(26).read_bytes()[:1000])
    shutil.copy(trained.checkpoint(26), tmp_path / "later.ckpt")
    report = trained.report(16, alone)
    assert (report.samples.runs, report.samples.told_by) == ([(128, 133)], tmp_path / "later.ckpt")
    assert "4 steps before the step began\n" in report.table(0)
    assert "the samples are known from" in report.table(0)


def test_a_later_checkpoint_of_another_run_tells_nothing(trained, tmp_path):
    alone = shutil.copy(trained.checkpoint(12), tmp_path / "alone.ckpt")
    content = torch.load(trained.checkpoint(26), weights_only=True)
    content["TextData"]["history"][0]["rows"] = 4
    torch.save(content, tmp_path / "later.ckpt")
    assert trained.report(16, alone).samples.told_by is None


def test_shards_without_a_tokenizer_show_token_ids_and_each_row_is_a_document_without_an_end_of_text(trained, tmp_path):
    bare = TokenData(str(trained.shard), seq_len=64, micro_batch_size=2, seed=3, vocab_size=300)
    bare.setup()
    span = {"step": 0, "sample": 0, "rows": 8, "skipped": []}
    state = {"samples": 96, "micro_batches": 1, "history": [span], **bare._cursor.identity}
    path = changed(trained, tmp_path, TextData=None, TokenData=state)
    report = autopsy(model(), bare, path, 2)
    assert [finding.document.tokens for finding in report.documents] == [64] * 8
    assert all(finding.text.startswith("token ids ") and finding.file is None for finding in report.documents)


# ---- the parts, by hand


def test_a_document_ends_with_its_end_of_text_token(tmp_path):
    ids = np.array([5, 6, 0, 7, 8, 9, 0, 0, 4, 3, 2])
    with ShardWriter(tmp_path, "train", 256) as writer:
        writer.append(ids)
    data = TokenData(str(tmp_path / "train_*.bin"), seq_len=10, eot_id=0)
    data.setup()
    rows = data.training_rows()
    assert rows.offset(0, 0, -1) == (0, 0)
    batch = rows[0]
    found = documents_of(rows, [0], [batch], 0)
    # the row's first token, 5, has no loss
    assert [document.ids.tolist() for document in found] == [[6, 0], [7, 8, 9, 0], [0], [4, 3, 2]]
    assert [(document.first, document.stop, document.token) for document in found] == [
        (0, 2, 1), (2, 6, 3), (6, 7, 7), (7, 10, 8),
    ]  # fmt: skip
    assert len(documents_of(rows, [0], [batch], None)) == 1


@pytest.mark.parametrize("by_index", [False, True])
def test_documents_of_packed_rows_are_their_pieces_without_what_fills_a_row_up(tmp_path, monkeypatch, by_index):
    ends = np.cumsum(np.random.default_rng(0).integers(2, 60, 50))
    ids = np.arange(1, ends[-1] + 1)
    if by_index:  # an index tells where documents end, without a token for it
        in_index = lambda self, start, stop, eot_id: ends[(ends > start) & (ends <= stop)]  # noqa: E731
        monkeypatch.setattr(TokenStream, "document_ends", in_index)
    else:
        ids[ends - 1] = 0
    with ShardWriter(tmp_path, "train", 5000) as writer:
        writer.append(ids)
    data = TokenData(
        str(tmp_path / "train_*.bin"), seq_len=16, eot_id=0, packing="best_fit", cache_dir=str(tmp_path / "cache")
    )
    data.setup()
    samples, batches = rows_of(data.training_rows(), [(0, data._order().rows_in_pass - 1)])
    documents = documents_of(data.training_rows(), samples, batches, 0)
    assert sorted(token for document in documents for token in document.ids.tolist()) == sorted(ids.tolist())
    for document in documents:
        assert document.ids.tolist() == ids[document.token : document.token + document.tokens].tolist()
    pieces = data.sources[0].planned.meta["pieces"]
    assert len(documents) == pieces
