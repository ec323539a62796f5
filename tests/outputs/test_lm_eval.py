"""LMEval and `eval`: lm_eval's tasks are answered as each row by itself would be, on any number of ranks."""

import json
from functools import partial
from importlib.util import find_spec
from math import log

import pytest
import torch
from commands.exported import VOCABULARY, checkpoint, save, tokenizer
from harness import processes
from harness.runs import On, fit
from models.decoders import build
from outputs.test_sample_text import CONFIG, TOKENIZER, Module
from tokenizers import Tokenizer

from lightning_tricks import FSDP2Strategy, Llama, LMEval
from lightning_tricks import __main__ as door
from lightning_tricks._core.errors import UsageError
from lightning_tricks._trainer.lightning import pl
from lightning_tricks.outputs._text_model import TextModel

CHOICES = [
    {"q": "def parse(self", "choices": [", text):", " 7 7", " text text text return"], "answer": 0},
    {"q": "return", "choices": [" text", " x"], "answer": 1},
    {"q": "def parse(self, text):\n" * 9, "choices": ["return", "text"], "answer": 0},  # longer than a row
]
TEXTS = [{"text": "def parse(self, text):\n" * 7}, {"text": "x"}]
PROMPTS = [{"q": "def ", "a": "parse"}, {"q": "", "a": ""}, {"q": "return text\n" * 30, "a": ""}]
WRITE = "{until: [t], max_gen_toks: 9}"
KINDS = {
    "choice": (CHOICES, "multiple_choice", "'{{q}}'", "answer", "doc_to_choice: choices\n", "acc"),
    "text": (TEXTS, "loglikelihood_rolling", "''", "'{{text}}'", "", "bits_per_byte"),
    "write": (PROMPTS, "generate_until", "'{{q}}'", "'{{a}}'", f"generation_kwargs: {WRITE}\n", "bleu"),
}

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(find_spec("lm_eval") is None, reason="needs lm_eval"),
]


@pytest.fixture(scope="module", autouse=True)
def tasks(tmp_path_factory):
    """A folder with a task of each kind, read by `datasets` from files and into a folder of the test."""
    folder = tmp_path_factory.mktemp("tasks")
    for name, (rows, kind, text, target, more, metric) in KINDS.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / f"{name}.yaml").write_text(
            f"task: {name}\ndataset_path: json\ntest_split: test\noutput_type: {kind}\ntarget_delimiter: ''\n"
            f"dataset_kwargs: {{data_files: {{test: {folder / name}.jsonl}}, cache_dir: {folder / 'cache'}}}\n"
            f"doc_to_text: {text}\ndoc_to_target: {target}\n{more}metric_list: [{{metric: {metric}}}]\n"
        )
    return folder


@pytest.fixture
def files(tasks):
    return [str(tasks / f"{name}.yaml") for name in KINDS]


class Still(Module):
    """Its weights stay: each validation, on any number of ranks, scores the same."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def model_of(config=CONFIG):
    return TextModel(build(config), TOKENIZER, torch.device("cpu"), 0, config.max_seq_len)


class Request:
    def __init__(self, *args):
        self.args = args


def nats_of(decoder, tokens, count):
    """Log-probability of the last `count` tokens of a row by itself, and whether each is the most likely one."""
    chances = decoder(torch.tensor([tokens[:-1]]))[0].double().log_softmax(-1)[-count:]
    last = torch.tensor(tokens[-count:])
    return float(chances.gather(-1, last[:, None]).sum()), bool((chances.argmax(-1) == last).all())


def rolling(decoder, tokens, longest):
    """Log-probability of a text in windows; lm_eval gives the last one as much context as there is room."""
    row, total = [0, *tokens], 0.0
    for start in range(0, len(tokens), longest):
        end = min(start + longest, len(tokens))
        total += nats_of(decoder, row[max(end - longest, 0) : end + 1], end - start)[0]
    return total


@torch.no_grad()
def test_each_answer_is_that_of_its_row_alone():
    from lightning_tricks.outputs._harness_model import HarnessModel

    model, longest = model_of(), CONFIG.max_seq_len
    asked = HarnessModel(model, batch_size=2)
    decoder, encode = model.logits_of, model.encode
    greedy = int(decoder(torch.tensor([encode("def")]))[0, -1].argmax())
    pairs = [("def", " parse"), ("", "text"), ("(text)" * 60, "return text"), ("def", TOKENIZER.decode([greedy]))]
    found = asked.loglikelihood([Request(*pair) for pair in pairs])
    for (context, continuation), (nats, likeliest) in zip(pairs, found, strict=True):
        before = encode(context) or [0]
        after = encode(context + continuation)[len(encode(context)) :]
        expected = nats_of(decoder, (before + after)[-(longest + 1) :], len(after))
        assert nats == pytest.approx(expected[0], rel=1e-5)
        assert likeliest == expected[1]
    assert found[3][1]

    text = "def parse(self, text):\n    return text\n" * 8
    (nats,) = asked.loglikelihood_rolling([Request(text)])
    assert nats == pytest.approx(rolling(decoder, encode(text), longest), rel=1e-5)


@torch.no_grad()
def test_a_text_ends_before_a_stop_word_an_end_of_text_or_the_number_of_tokens():
    from lightning_tricks.outputs._harness_model import HarnessModel

    prompt, ids = TOKENIZER.encode("return").ids, TOKENIZER.encode("def parse text").ids
    script = [*prompt, *ids, 0, *[5] * 99]  # whatever it reads, the model writes its next token

    def logits_of(rows):
        following = torch.tensor(script[1 : rows.shape[1] + 1]).expand(rows.shape)
        return torch.nn.functional.one_hot(following, 300).float()

    asked = HarnessModel(TextModel(logits_of, TOKENIZER, torch.device("cpu"), 0, 48))
    settings = [(["par"], 20), ([], 20), ("never", 2)]
    requests = [Request("return", {"until": until, "max_gen_toks": count}) for until, count in settings]
    assert asked.generate_until(requests) == ["def ", "def parse text", TOKENIZER.decode(ids[:2])]


def scores(files, **options):
    """What two validations log, of weights that stay."""
    run = fit(
        Still(), LMEval(files, batch_size=1), max_steps=4, val_check_interval=2, num_sanity_val_steps=1, **options
    )
    return [(step, row) for step, values in run.rows if (row := {k: v for k, v in values.items() if "eval" in k})]


def scores_in_two(files, rank):
    return scores(files, strategy=FSDP2Strategy(), devices=2, use_distributed_sampler=False)


def test_each_validation_logs_the_scores_and_two_sharded_ranks_the_same(files):
    first, second = scores(files)
    assert [first[0], second[0]] == [1, 3]  # the last step before each
    assert first[1] == second[1]
    assert set(first[1]) == {"eval/choice/acc", "eval/text/bits_per_byte", "eval/write/bleu"}
    shared, other = processes.run(partial(scores_in_two, files))
    for (step, row), expected in zip(shared or other, (first, second), strict=True):
        assert step == expected[0]
        assert row == pytest.approx(expected[1], rel=1e-5)


def test_training_is_the_same_with_it_and_it_keeps_to_its_validations(files):
    kept = []
    keep = On(on_train_batch_end=lambda trainer, *_: kept.append("eval/choice/acc" in trainer.callback_metrics))
    plain = fit(Module(), max_steps=6, val_check_interval=2)
    scored = fit(Module(), LMEval(files, every_n_validations=2), keep, max_steps=6, val_check_interval=2)
    assert kept == [False] * 4 + [True] * 2
    assert [step for step, values in scored.rows if "eval/choice/acc" in values] == [3]
    assert all(torch.equal(a, b) for a, b in zip(plain.weights, scored.weights, strict=True))
    assert torch.equal(plain.random_state, scored.random_state)
    once, again = LMEval(files, every_n_validations=2), LMEval(files)
    once._validations = 3
    again.load_state_dict(once.state_dict())
    assert again._validations == 3


def test_the_command_scores_a_checkpoint_as_its_decoder_does(tasks, tmp_path, capsys):
    config = Llama(vocab_size=VOCABULARY, d_model=32, n_layers=2, n_heads=4, max_seq_len=32)
    path, output = save(checkpoint(config), tmp_path / "run.ckpt"), tmp_path / "scores.json"
    options = ["--tasks", "text,choice", "--include_path", str(tasks), "--json"]
    door.run(["eval", "--ckpt_path", str(path), *options, str(output)])
    assert "bits_per_byte" in (printed := capsys.readouterr().out)
    found = json.loads(output.read_text())
    assert f"{found['results']['text']['bits_per_byte,none']:.4f}" in printed
    assert found["config"]["checkpoint"] == str(path)
    decoder, encode = build(config), Tokenizer.from_str(tokenizer()["json"]).encode
    with torch.no_grad():
        nats = sum(rolling(decoder, encode(row["text"]).ids, 32) for row in TEXTS)
    bits = -nats / log(2) / sum(len(row["text"]) for row in TEXTS)
    assert found["results"]["text"]["bits_per_byte,none"] == pytest.approx(bits, rel=1e-5)
    door.run(["eval", "--ckpt_path", str(path), *options, "-"])
    alone = capsys.readouterr()
    assert json.loads(alone.out)["results"] == found["results"]
    assert "bits_per_byte" in alone.err


def test_a_run_that_cannot_score_is_refused_at_its_start(files, tmp_path):
    class Without(Module):
        def __init__(self):
            super().__init__()
            del self.tokenizer

    with pytest.raises(UsageError, match="LMEval needs a tokenizer"):
        fit(Without(), LMEval(files))
    with pytest.raises(UsageError, match="max_length=99: the model's longest row is 48"):
        fit(Module(), LMEval(files, max_length=99))
    (broken := tmp_path / "broken.yaml").write_text(
        f"task: broken\ndataset_path: json\ndataset_kwargs: {{data_files: {tmp_path}/none}}\n"
    )
    with pytest.raises(UsageError, match=r"^tasks=.*broken.yaml: cannot be loaded \("):
        fit(Module(), LMEval([str(broken)]))
    with pytest.raises(UsageError, match="include_path='nowhere': there is no such folder"):
        fit(Module(), LMEval(["choice"], include_path="nowhere"))


def test_validate_alone_runs_the_tasks(files):
    data = torch.utils.data.DataLoader([torch.arange(32).view(2, 16)], batch_size=None)
    trainer = pl.Trainer(
        accelerator="cpu", callbacks=[LMEval(files, every_n_validations=5)], logger=False, enable_progress_bar=False
    )
    (found,) = trainer.validate(Still(), data, verbose=False)
    assert 0 <= found["eval/choice/acc"] <= 1
