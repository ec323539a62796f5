"""MixtureData: rows of several sources, whatever the split of the global batch, over resumes and changed weights."""

import json
from collections import Counter

import numpy as np
import pytest
import torch
from harness.models import Small
from harness.runs import fit, trainer_with

from lightning_tricks import LanguageModel, Llama, TotalTokens
from lightning_tricks._core.errors import UsageError
from lightning_tricks._trainer.lightning import pl
from lightning_tricks.data import MixtureData, MixtureSource, ShardWriter, TextData, TokenData, WeightChange
from lightning_tricks.data.tokenizer import train_bpe

T = 8


@pytest.fixture
def shards(tmp_path):
    """Three token files; a token tells its source (hundreds) but not its place."""
    for number, (name, tokens) in enumerate({"web": 4000, "code": 1200, "books": 900}.items()):
        folder = tmp_path / name
        folder.mkdir()
        for part, count in (("train", tokens), ("val", 50 * (number + 1))):
            with ShardWriter(folder, part, 1000) as writer:
                writer.append(np.random.default_rng(number).integers(1, 100, count) + 100 * number)
    return tmp_path


def sources(shards, *weights, **options):
    names = ("web", "code", "books")[: len(weights)]
    return [
        MixtureSource(
            TokenData(str(shards / name / "train_*.bin"), str(shards / name / "val_*.bin"), eot_id=0),
            weight,
            name,
            options.get(name),
        )
        for name, weight in zip(names, weights, strict=True)
    ]


def mixture(shards, *weights, ends=None, **options):
    data = MixtureData(sources(shards, *weights, **(ends or {})), seq_len=T, micro_batch_size=2, **options)
    data.setup()
    return data


def test_each_source_has_its_share_and_its_own_rows_in_its_own_order(shards):
    data = mixture(shards, 5, 3, 2)
    batches = [data.training_rows()[row] for row in range(1000)]
    counts = Counter(int(batch["source"]) for batch in batches)
    assert [round(counts[source] / 100) for source in range(3)] == [5, 3, 2]
    assert all((batch["labels"] // 100 == batch["source"]).all() for batch in batches)
    alone = TokenData(str(shards / "code" / "train_*.bin"), seq_len=T, seed=data.sources[1].seed)
    alone.setup()
    of_code = [batch["labels"] for batch in batches if batch["source"] == 1]
    assert len(of_code) > alone._order().rows_in_pass
    assert all(torch.equal(row, alone.training_rows()[n]["labels"]) for n, row in enumerate(of_code))


def test_validation_has_rows_of_one_source_each_and_all_of_them(shards):
    data = mixture(shards, 1, 1, 1)
    seen = Counter()
    for batch in data.val_dataloader():
        assert len(set(batch["source"].tolist())) == 1
        counted = batch["labels"][batch["labels"] >= 0]
        assert (counted // 100 == batch["source"][0]).all()
        seen[int(batch["source"][0])] += len(counted)
    assert seen == {0: 49, 1: 99, 2: 149}
    first = [int(batch["source"][0]) for batch, _ in zip(data.val_dataloader(), range(4), strict=False)]
    assert first == [0, 1, 2, 0], "limit_val_batches would leave a source out"
    assert [data.validation_source(number) for number in range(4)] == first
    assert len(list(data.val_dataloader())) == len(data.val_dataloader())


class Watching(Small):
    """Keeps the first label of each row of a micro-batch, and trains a weight that is of no use."""

    def __init__(self):
        super().__init__(4, 1)
        self.rows = []

    def training_step(self, batch, batch_idx):
        self.rows += [tuple(row) for row in torch.cat([batch["source"][:, None], batch["labels"]], 1).tolist()]
        return self.net(torch.ones(1, 4)).sum() * 0


class Stop(pl.Callback):
    """Ends the run after a step, as a kill would, so that the schedule of the run stays that of all its steps."""

    def __init__(self, step):
        self.step = step

    def on_train_batch_end(self, trainer, *_):
        trainer.should_stop = trainer.global_step >= self.step


def trained(data, tmp_path, steps, ckpt_path=None, save="last.ckpt", **options):
    model = Watching()
    trainer = trainer_with(max_steps=steps, limit_val_batches=0, **options)
    trainer.fit(model, data, ckpt_path=ckpt_path)
    trainer.save_checkpoint(tmp_path / save)
    return model.rows


def rows_of(data, positions):
    batches = data.training_rows()
    found = [batches[position] for position in positions]
    return [(int(batch["source"]), *batch["labels"][0].tolist()) for batch in found]


def test_a_run_is_the_pure_function_over_resumes_with_other_splits(shards, tmp_path):
    data = lambda **options: MixtureData(  # noqa: E731
        sources(shards, 5, 3, 2),
        [WeightChange({"web": 1, "code": 0, "books": 4}, at_fraction=0.5)],
        seq_len=T,
        **options,
    )
    unbroken = trained(data(micro_batch_size=4), tmp_path, 40)
    rows = trained(data(micro_batch_size=4), tmp_path, 40, save="0.ckpt", limit_train_batches=1.0)
    assert rows == unbroken
    rows = []
    for number, (stop, size, accumulate) in enumerate([(7, 2, 2), (20, 1, 4), (21, 4, 1), (40, 2, 2)]):
        model = Watching()
        trainer = trainer_with(Stop(stop), max_steps=40, limit_val_batches=0, accumulate_grad_batches=accumulate)
        trainer.fit(model, data(micro_batch_size=size), ckpt_path=tmp_path / f"{number}.ckpt" if number else None)
        trainer.save_checkpoint(tmp_path / f"{number + 1}.ckpt")
        rows += model.rows
    assert rows == unbroken
    assert Counter(row[0] for row in unbroken[80:])[1] == 0


def own_rows(data, name, count):
    """The first rows of a source in its own order."""
    number = [source.name for source in data.sources].index(name)
    alone = TokenData(str(data.sources[number].streams["train"].paths[0]), seq_len=T, seed=data.sources[number].seed)
    alone.setup()
    return [alone.training_rows()[row]["labels"][0].tolist() for row in range(count)]


def of_source(rows, number):
    return [list(row[1:]) for row in rows if row[0] == number]


def test_changed_weights_and_sources_hold_from_the_resume_on_and_no_row_comes_twice_or_is_lost(
    shards, tmp_path, caplog
):
    caplog.set_level("INFO")
    settings = {"seq_len": T, "micro_batch_size": 4}
    rows = trained(MixtureData(sources(shards, 5, 3), **settings), tmp_path, 20)
    assert "the mixture is" not in caplog.text
    changed = MixtureData(sources(shards, 1, 1, 2), **settings)
    more = trained(changed, tmp_path, 40, tmp_path / "last.ckpt")
    assert "From sample 80 on, the mixture is web 25.00%, code 25.00%, books 50.00%; it was web 62.50%" in caplog.text
    assert 35 <= len(of_source(more, 2)) <= 45
    caplog.clear()
    without = MixtureData([source for source in sources(shards, 1, 1, 2) if source.name != "code"], **settings)
    last = trained(without, tmp_path, 60, tmp_path / "last.ckpt")
    assert "it was web 25.00%, code 25.00%, books 50.00%" in caplog.text
    again = trained(MixtureData(sources(shards, 1, 1, 2), **settings), tmp_path, 80, tmp_path / "last.ckpt")
    for number, name in enumerate(("web", "code", "books")):
        before = [*of_source(rows, number), *of_source(more, number)]
        without_code = {"web": of_source(last, 0), "code": [], "books": of_source(last, 1)}[name]
        all_rows = [*before, *without_code, *of_source(again, number)]
        assert all_rows == own_rows(changed, name, len(all_rows))


def test_the_same_recipe_resumes_without_a_line(shards, tmp_path, caplog):
    caplog.set_level("INFO")
    changes = [
        WeightChange({"web": 1, "code": 5}, at_tokens=30 * T),
        WeightChange({"web": 1, "code": 1}, at_tokens=90 * T),
    ]
    data = lambda: MixtureData(sources(shards, 5, 3), changes, seq_len=T, micro_batch_size=4)  # noqa: E731
    unbroken = trained(data(), tmp_path, 40)
    rows = trained(data(), tmp_path, 10)
    rows += trained(data(), tmp_path, 20, tmp_path / "last.ckpt")
    rows += trained(data(), tmp_path, 40, tmp_path / "last.ckpt")
    assert rows == unbroken
    assert "mixture is" not in caplog.text


def test_a_source_ends_after_its_epochs_and_its_share_goes_to_the_others(shards, tmp_path, caplog):
    caplog.set_level("INFO")
    data = mixture(shards, 1, 1, ends={"code": 2})
    last = 2 * data._order().passes[1].rows
    rows = trained(MixtureData(sources(shards, 1, 1, code=2), seq_len=T, micro_batch_size=4), tmp_path, 200)
    assert len(of_source(rows, 1)) == last
    end = max(n for n, row in enumerate(rows) if row[0] == 1) + 1
    assert f"code ends at sample {end}, after max_epochs; then web 100.00%" in caplog.text
    assert abs(end - 2 * last) <= 2
    assert {name: tokens for name, (tokens, _) in data.seen(800).items()} == {
        "web": (800 - last) * T, "code": last * T,
    }  # fmt: skip
    assert data.seen(800)["code"][1] == 2


def test_a_tokenizer_is_not_learned_beside_tokens_of_an_unknown_one(shards):
    (shards / "rows.txt").write_text("Some words.\n\n" * 500)
    data = MixtureData([MixtureSource(str(shards / "web" / "train_*.bin")), MixtureSource(str(shards / "rows.txt"))])
    with pytest.raises(UsageError, match="tokenizer=None: give the one that wrote web"):
        data.prepare_data()


def test_a_folder_of_token_shards_is_a_source_by_its_path(shards):
    (shards / "web" / "val_000000.bin").unlink()
    data = MixtureData([MixtureSource(str(shards / "web")), *sources(shards, None, None)[1:]], seq_len=T)
    data.setup()
    assert data.sources[0].streams["train"].paths == [shards / "web" / "train_000000.bin"]


def test_skipped_samples_count_as_tokens_of_no_source(shards):
    data = mixture(shards, 5, 3, 2, skip_samples=[[10, 29], [70, 90]])
    rows = data.training_rows()
    served = Counter(int(rows[n]["source"][0]) for n in range(80) if not (10 <= n <= 29 or n >= 70))
    assert [tokens for tokens, _ in data.seen(80).values()] == [T * served[source] for source in range(3)]


def test_a_run_longer_than_all_its_sources_is_refused(shards, tmp_path):
    ends = {"web": 1, "code": 1}
    rows = sum(order.rows for order in mixture(shards, 1, 1)._order().passes)
    made = lambda: MixtureData(sources(shards, 1, 1, **ends), seq_len=T, micro_batch_size=1)  # noqa: E731
    assert len(trained(made(), tmp_path, rows)) == rows
    with pytest.raises(UsageError, match=f"all of them end after {rows} rows, and the run takes {rows + 1} rows"):
        trained(made(), tmp_path, rows + 1)
    with pytest.raises(UsageError, match=f"the run takes {3 * rows:,} rows; raise max_epochs of one, or lower"):
        trained(made(), tmp_path, -1, max_epochs=3)
    with pytest.raises(UsageError, match="the run has no end; raise max_epochs of one, or lower"):
        trained(made(), tmp_path, -1, max_epochs=-1)
    assert len(trained(made(), tmp_path, -1, max_epochs=1)) == rows


def test_other_data_of_a_source_are_told_by_its_name(shards, tmp_path):
    settings = {"seq_len": T, "micro_batch_size": 4}
    trained(MixtureData(sources(shards, 5, 3), **settings), tmp_path, 5)
    with ShardWriter(shards / "code", "train", 1000) as writer:
        writer.append(np.full(3000, 150))
    with pytest.warns(UserWarning, match="Not the data of the checkpoint's run: code. Rows"):
        rows = trained(MixtureData(sources(shards, 5, 3), **settings), tmp_path, 10, tmp_path / "last.ckpt")
    assert len(rows) == 20


def test_without_weights_shares_follow_the_sizes_to_the_power_of_the_temperature(shards):
    for temperature, expected in ((None, [4000, 1200, 900]), (0.0, [1, 1, 1]), (0.5, [4000**0.5, 1200**0.5, 30])):
        shares = mixture(shards, None, None, None, temperature=temperature)._mixture.segments()[0].weights.values()
        assert [*shares] == pytest.approx([1e6 * weight / sum(expected) for weight in expected], abs=1)
    assert mixture(shards, None, None, temperature=1000.0)._mixture.segments()[0].weights == {"web": 1_000_000}


@pytest.mark.parametrize(
    ("weights", "options", "line"),
    [
        ([1, None], {}, "sources: code have no weight, and others have"),
        ([0, 0], {}, "sources: all weights are 0"),
        ([1, -1], {}, "sources: weight=-1 of code: it must be 0 or more"),
        ([1, float("nan")], {}, "sources: weight=nan of code"),
        ([1, 1], {"temperature": 1.0}, "temperature=1.0: it makes weights of the sizes"),
        ([None, None], {"temperature": -1.0}, "temperature=-1.0: it must be 0 or more"),
        ([1, 1], {"vocab_size": 256}, "vocab_size=256: 256 bytes and end-of-text need at least 257"),
        ([1, 1], {"vocab_size": None}, "vocab_size=None: 256 bytes"),
        ([1, 1], {"weights": [WeightChange({"web": 1}, 3)]}, "weights: code has no weight; name each of web, code"),
        ([1, 1], {"weights": [WeightChange({"web": 1, "cod": 1}, 3)]}, "weights: cod is no source"),
        ([1, 1], {"weights": [WeightChange({"web": 1, "code": 1})]}, "weights: give at_tokens or at_fraction"),
        ([1, 1], {"weights": [WeightChange({"web": 1, "code": 1}, 3, 0.5)]}, "weights: give at_tokens or at_fraction"),
        ([1, 1], {"weights": [WeightChange({"web": 1, "code": 1}, -3)]}, "weights: at_tokens=-3"),
        ([1, 1], {"weights": [WeightChange({"web": 1, "code": 1}, None, 2)]}, "weights: at_fraction=2"),
        ([1, 1], {"ends": {"code": 0}}, "sources: max_epochs=0 of code"),
        ([], {}, r"sources=\[\]: name at least one"),
    ],
)
def test_refusals(shards, weights, options, line):
    with pytest.raises(UsageError, match=line):
        mixture(shards, *weights, **options)


def test_names_and_settings_of_sources_are_refused_where_they_contradict(shards):
    web = str(shards / "web" / "train_*.bin")
    with pytest.raises(UsageError, match="two are called web; give each a name"):
        MixtureData([MixtureSource(web), MixtureSource(web)])
    with pytest.raises(UsageError, match=r"name='a/b': give it a name of letters"):
        MixtureData([MixtureSource(web, name="a/b")])
    with pytest.raises(UsageError, match=r"data\.seq_len=99: a mixture has one seq_len"):
        MixtureData([MixtureSource(TokenData(web, seq_len=99))], seq_len=T)
    with pytest.raises(UsageError, match=r"data\.vocab_size=999: a mixture has one vocab_size"):
        MixtureData([MixtureSource(TextData(str(shards), vocab_size=999))])
    assert MixtureData([{"data": TokenData(web, seq_len=T)}], seq_len=T).seq_len == T


def test_paths_alone_are_sources_with_shares_by_their_sizes(shards):
    paths = [str(shards / name / "train_*.bin") for name in ("web", "code")]
    data = MixtureData(paths, seq_len=T, cache_dir=str(shards / "cache"))
    data.setup()
    assert {part.cache_dir for part in data._parts.values()} == {shards / "cache"}
    assert data.data_summary().startswith("Mixture: web 76.92% (4,000 tokens), code 23.08% (1,200 tokens)")


@pytest.fixture
def texts(tmp_path, story):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": f"row {n} of {n % 7} rows, and more"}) + "\n" for n in range(300)))
    return story, rows


def test_one_tokenizer_is_learned_from_all_texts_and_known_next_time(texts, tmp_path, capsys):
    made = lambda: MixtureData([MixtureSource(str(path)) for path in texts], vocab_size=300, seq_len=T, cache_dir=str(tmp_path / "cache"))  # noqa: E731, E501  # fmt: skip
    data, again = made(), made()
    data.prepare_data()
    data.setup()
    assert capsys.readouterr().err.count("Learning a tokenizer of 300 tokens from 2 sources") == 1
    again.setup()
    assert "Learning" not in capsys.readouterr().err
    assert [source.name for source in data.sources] == ["story", "rows"]
    assert data.vocab_size == 300
    assert "n_bytes" in next(iter(data.val_dataloader()))
    corpora = [part.corpus for part in data._parts.values()]
    learned_alone = {train_bpe(corpus.documents(), 300).to_str() for corpus in corpora}
    assert data.tokenizer.to_str() not in learned_alone
    text = data.training_text().decode()
    assert "Chapter" in text
    assert "of 3 rows" in text


def test_sources_with_other_tokenizers_are_refused(texts, tmp_path):
    files = []
    for number in range(2):
        path = tmp_path / f"{number}.json"
        path.write_text(train_bpe([f"text number {number} " * 50], 260 + number).to_str())
        files.append(str(path))
    made = [
        MixtureSource(TextData(str(path), tokenizer=file, cache_dir=str(tmp_path)))
        for path, file in zip(texts, files, strict=True)
    ]
    with pytest.raises(UsageError, match="sources: story and rows have different tokenizers; encode both with one"):
        MixtureData(made).setup()
    with pytest.raises(UsageError, match="sources: the mixture and story have different tokenizers"):
        MixtureData(made[:1], tokenizer=files[1]).setup()


def test_a_language_model_logs_each_source_by_itself(shards, tmp_path):
    decoder = Llama(vocab_size=300, d_model=16, n_layers=1, n_heads=2, max_seq_len=T)
    model = LanguageModel(decoder, optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
    data = MixtureData(sources(shards, 5, 3, 2), seq_len=T, micro_batch_size=3)
    run = fit(model, data=data, max_steps=6, accumulate_grad_batches=2, log_every_n_steps=2, val_check_interval=12)
    names = ("web", "code", "books")
    for step, values in run.rows:
        if "train/loss" in values:
            rows = [data.training_rows()[row] for row in range(6 * step, 6 * step + 6)]
            of = [sum(int(row["source"]) == number for row in rows) for number in range(3)]
            mean = sum(values[f"sources/{name}/train_loss"] * n for name, n in zip(names, of, strict=True) if n)
            assert mean / 6 == pytest.approx(values["train/loss"], rel=1e-6)
            assert all((f"sources/{name}/train_loss" in values) == bool(n) for name, n in zip(names, of, strict=True))
    (val,) = (values for _, values in run.rows if "val/loss" in values)
    tokens = {"web": 49, "code": 99, "books": 149}
    mean = sum(val[f"sources/{name}/val_loss"] * n for name, n in tokens.items()) / sum(tokens.values())
    assert mean == pytest.approx(val["val/loss"], rel=1e-6)
    served = run.at("sources/web/tokens")
    assert served
    assert all(count == data.seen(6 * (step + 1))["web"][0] for step, count in served.items())
    assert run.at("sources/books/epochs").keys() == served.keys()


def test_a_change_at_a_fraction_takes_the_length_from_total_tokens(shards, tmp_path):
    change = WeightChange({"web": 0, "code": 1}, at_fraction=0.5)
    made = lambda: MixtureData(sources(shards, 1, 0), [change], seq_len=T, micro_batch_size=1)  # noqa: E731
    trainer, model = trainer_with(max_steps=-1, limit_val_batches=0), Watching()
    trainer.callbacks.append(TotalTokens(20 * T, micro_batch_tokens=T))
    trainer.fit(model, made())
    assert [source for source, *_ in model.rows] == [0] * 10 + [1] * 10
    with pytest.raises(UsageError, match=r"at_fraction needs trainer.max_steps or TotalTokens"):
        trained(made(), tmp_path, -1, max_epochs=1)
