"""SampleText: the model's own greedy text for any module with logits, without a trace in training."""

import re

import pytest
import torch
import transformers
from harness import processes
from harness.runs import On, fit
from short_run import tensors
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from torch.utils.data import DataLoader

from lightning_tricks import FSDP2Strategy, ResumingTensorBoardLogger, SampleText, generate
from lightning_tricks._core.errors import UsageError
from lightning_tricks._trainer.lightning import pl
from lightning_tricks.data.tokenizer import train_bpe
from lightning_tricks.models import GPT2, Decoder, Llama, Sampling
from lightning_tricks.models.generate import continue_rows

TOKENIZER = train_bpe(["def parse(self, text):\n    return text\n" * 20], 300)
CONFIG = Llama(vocab_size=300, d_model=32, n_layers=2, n_heads=2, max_seq_len=48)


class Module(pl.LightningModule):
    """A module of somebody's own, whose forward gives logits."""

    def __init__(self, broken=False):
        super().__init__()
        torch.manual_seed(0)
        self.model, self.dropout, self.broken = Decoder(CONFIG), nn.Dropout(0.1), broken
        self.tokenizer = TOKENIZER

    def forward(self, ids):
        logits = self.model(ids)
        return logits * float("nan") if self.broken else logits

    def training_step(self, batch, batch_idx):
        return self.dropout(self.model(batch)).square().mean()

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.model(batch).square().mean())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def train_dataloader(self):
        return DataLoader(list(torch.arange(2 * 16 * 8).view(-1, 2, 16) % 300), batch_size=None)

    def val_dataloader(self):
        return DataLoader([torch.arange(32).view(2, 16)], batch_size=None)


def run(*callbacks, model=None, **options):
    defaults = {"max_steps": 4, "val_check_interval": 2, "num_sanity_val_steps": 1}
    return fit(model or Module(), *callbacks, **{**defaults, **options})


def greedy(decoder, ids, count):
    return [int(token) for token in generate(decoder, torch.tensor([ids]), count)]


@pytest.mark.parametrize("config", [CONFIG, GPT2(vocab_size=300, d_model=32, n_layers=2, n_heads=2, max_seq_len=48)])
def test_rows_of_different_lengths_continue_as_each_would_alone(config):
    torch.manual_seed(0)
    decoder, prompts = Decoder(config), [[5], [7, 8, 9, 10, 11, 12, 13], [1, 2]]
    with torch.no_grad():
        found = continue_rows(decoder, prompts, 12, Sampling(temperature=0.0), torch.Generator())
    assert found == [greedy(decoder, prompt, 12) for prompt in prompts]


def test_the_longest_row_that_fits_is_used_to_its_end():
    decoder = Decoder(CONFIG)
    with torch.no_grad():
        found = continue_rows(decoder, [[1] * 7], 41, Sampling(temperature=0.0), torch.Generator(), max_seq_len=48)
    assert found == [greedy(decoder, [1] * 7, 41)]


def test_each_validation_prints_what_the_model_writes_and_shows_it_in_tensorboard(tmp_path, capsys):
    logger, model = ResumingTensorBoardLogger(tmp_path, name="run", version=""), Module()
    sample = SampleText(["def ", ""], max_new_tokens=8, temperature=0.0)
    run(sample, model=model, logger=logger)
    printed = capsys.readouterr().out
    assert printed.count("step 2  sample 0") == printed.count("step 4  sample 1") == 1
    assert "step 0" not in printed  # the sanity check is silent
    ids = TOKENIZER.encode("def ").ids
    written = greedy(model.model.eval(), ids, 8)
    text = "def " + TOKENIZER.decode(written[: written.index(0)] if 0 in written else written)
    block = "\n".join(f"    {line}" for line in text.splitlines())
    assert f"step 4  sample 0\n{block}\n" in printed
    shown = tensors(tmp_path / "run").Tensors("samples/0/text_summary")
    assert [event.step for event in shown] == [2, 4]
    assert shown[-1].tensor_proto.string_val[0].decode() == block


def test_of_several_blank_lines_one_is_printed_and_the_indent_below_them_stays(capsys):
    run(SampleText(["a\n\n \n\n  b\n\nc\nd"], max_new_tokens=1))
    assert "sample 0\n    a\n    \n      b\n    \n    c\n    d" in capsys.readouterr().out


def steps_of(text):
    return [int(step) for step in re.findall(r"^step (\d+)  sample 0", text, re.M)]


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"max_steps": 20}, [2, 4, 6, 8, 10, 12, 14, 16, 18, 20]),
        ({"max_steps": 24, "val_check_interval": 2}, [4, 6, 8, 10, 12, 16, 18, 20, 22, 24]),
        ({"max_steps": 6, "val_check_interval": 3}, [3, 6]),
        ({"max_steps": -1, "max_epochs": 2}, [2, 4, 5, 7, 8, 10, 12, 13, 15, 16]),  # of eight
    ],
)
def test_samples_come_at_each_tenth_of_the_run_and_at_its_end(capsys, options, steps):
    run(SampleText(max_new_tokens=2), **{"val_check_interval": 1, **options})
    assert steps_of(capsys.readouterr().out) == steps


@pytest.mark.parametrize("stop", [5, 6, 7])
def test_a_resumed_run_and_a_second_fit_have_the_same_samples(tmp_path, capsys, stop):
    options = {"val_check_interval": 1, "max_steps": 24}
    again = SampleText(max_new_tokens=2)
    for _ in range(2):
        run(again, **options)
    straight = steps_of(capsys.readouterr().out)
    assert straight[: len(straight) // 2] == straight[len(straight) // 2 :]

    def save(trainer, module, *_):
        if trainer.global_step == stop:
            trainer.save_checkpoint(tmp_path / "last.ckpt")
            trainer.should_stop = True

    run(SampleText(max_new_tokens=2), On(on_validation_end=save), **options)
    run(SampleText(max_new_tokens=2), ckpt_path=tmp_path / "last.ckpt", **options)
    assert steps_of(capsys.readouterr().out) == straight[: len(straight) // 2]


def test_a_validation_alone_names_no_step(capsys):
    data = DataLoader(torch.zeros(1, 8, dtype=torch.long))
    sample, quiet = SampleText(["def "], max_new_tokens=4), {"enable_progress_bar": False, "logger": False}
    pl.Trainer(accelerator="cpu", callbacks=[sample], **quiet).validate(Module(), data, verbose=False)
    assert re.search("^sample 0$", capsys.readouterr().out, re.M)


def test_each_validation_draws_the_same_random_numbers(capsys):
    class Frozen(Module):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.0)

    run(SampleText(max_new_tokens=16, temperature=1.0), model=Frozen())
    first, second = (part.split("step 4")[0] for part in capsys.readouterr().out.split("sample 0\n")[1:])
    assert first.strip() == second.strip() != ""


def test_transformers_models_and_tokenizers_work(capsys):
    class HuggingFace(Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            shape = {"vocab_size": 300, "n_positions": 48, "n_embd": 32, "n_layer": 1, "n_head": 2}
            self.model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape))
            self.tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=TOKENIZER, eos_token="<|endoftext|>")

        def forward(self, ids):
            return self.model(ids)

        def training_step(self, batch, batch_idx):
            return self.model(batch, labels=batch).loss

        def validation_step(self, batch, batch_idx):
            self.log("val/loss", self.model(batch, labels=batch).loss)

    run(SampleText(["", "def "], max_new_tokens=6), model=HuggingFace())
    assert capsys.readouterr().out.count("step 4  sample") == 2
    with pytest.raises(UsageError, match="more than max_seq_len=48: give at most 47"):
        run(SampleText(max_new_tokens=60), model=HuggingFace())


class KnowsFewerIds:
    """As tiktoken's encodings, which raise for an id that the model alone has."""

    def encode(self, text):
        return [1, 2, 3]

    def decode(self, ids):
        raise KeyError("Invalid token for decoding: 299")


def test_a_model_of_nan_or_with_ids_that_are_no_tokens_is_said_and_ends_nothing(capsys):
    sample = SampleText(["def "], max_new_tokens=4, temperature=1.0)
    run(sample, model=Module(broken=True))
    assert capsys.readouterr().out.count("def  (the model's logits are NaN)") == 2
    model = Module()
    model.tokenizer = KnowsFewerIds()
    run(sample, model=model)
    assert capsys.readouterr().out.count("def  (the tokenizer does not decode the model's ids: KeyError: ") == 2


def test_no_block_is_compiled_for_samples(capsys):
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def graphs_of_a_run(*callbacks):
        torch.compiler.reset()
        graphs.clear()
        model = Module()
        for block in model.model.blocks:
            block.compile(backend=count)
        run(*callbacks, model=model)
        return len(graphs)

    without = graphs_of_a_run()
    assert without == graphs_of_a_run(SampleText(["def "], max_new_tokens=20)) > 0  # rows of another width
    assert capsys.readouterr().out.count("step 4  sample") == 1


def greedy_samples(**options):
    """What each validation of a run writes."""
    sample, kept = SampleText(["def ", ""], max_new_tokens=8, temperature=0.0), []
    keep = On(on_validation_epoch_end=lambda *_: kept.append([*sample._texts]))
    run(sample, keep, **options)
    return kept[-2:]


def sample_in_two(rank):
    compile_ = torch.nn.Module.compile
    torch.nn.Module.compile = lambda module: compile_(module, backend="eager")  # inductor would take a minute
    return greedy_samples(strategy=FSDP2Strategy(compile_blocks=True), devices=2, use_distributed_sampler=False)


@pytest.mark.long
def test_sharded_compiled_modules_write_what_one_process_does():
    assert processes.run(sample_in_two) == [greedy_samples()] * 2


def test_a_run_that_cannot_sample_is_refused_at_its_start():
    class Without(Module):
        def __init__(self):
            super().__init__()
            del self.tokenizer

    with pytest.raises(UsageError, match="SampleText needs a tokenizer"):
        run(SampleText(), model=Without())
    wordless = Module()
    wordless.tokenizer = Tokenizer(WordLevel({"def": 5, "?": 0}, "?"))
    with pytest.raises(UsageError, match=r"^SampleText: prompts: '' holds no token and no end-of-text token is known$"):
        run(SampleText(), model=wordless)
    run(SampleText(["def"], max_new_tokens=2), model=wordless, max_steps=2)  # no text ends before its last token
    with pytest.raises(UsageError, match=r"max_new_tokens=64 after the \d tokens of 'def ' is more than max_seq_len"):
        fit(Ours(), SampleText(["def "]))


class Ours(Module):
    """Says the longest row that it takes, as LanguageModel does."""

    def __init__(self):
        super().__init__()
        self.config = CONFIG
