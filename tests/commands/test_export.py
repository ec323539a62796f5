"""`export`: transformers alone finds the decoder's logits, text and token ids in the folder, or there is no folder."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from commands.exported import SIZES, checkpoint, fresh_python, save, tokenizer
from harness.models import Small
from harness.processes import run as run_processes
from harness.runs import fit, trainer_with
from safetensors.torch import load_file

from lightning_tricks import FSDP2Strategy, InitFrom, LanguageModel
from lightning_tricks import __main__ as door
from lightning_tricks._core.errors import UsageError
from lightning_tricks.checkpoints.write_file import locked
from lightning_tricks.commands.export import verify_export
from lightning_tricks.commands.export.model_card import figures_of_run, llama_cpp_target, model_card
from lightning_tricks.commands.generate import decoder_from_checkpoint
from lightning_tricks.data.tokenizer import tokenizer_from_checkpoint
from lightning_tricks.mixins._plain_settings import to_plain
from lightning_tricks.models import GPT2, Llama
from lightning_tricks.models import generate as generate_tokens
from lightning_tricks.optim import MuP
from lightning_tricks.parallel.dims import ParallelDims

pytestmark = pytest.mark.long


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr("sys.executable", fresh_python())


def export(path, output, *options):
    door.run(["export", "--ckpt_path", str(path), "--output", str(output), *map(str, options)])
    return output


CASES = {
    "llama tied": Llama(**SIZES, tie_embeddings=True, n_kv_heads=2),
    "qwen3": Llama(**SIZES, qk_norm=True),
    "apertus": Llama(**SIZES, activation="relu2", qk_norm=True),
    "gpt2": GPT2(**SIZES),
    "dots1": Llama(
        **SIZES, n_experts=4, d_expert=16, n_shared_experts=1, router="sigmoid", qk_norm=True, dense_layers=1
    ),
}


# test_hf_adapter.py has each family
@pytest.mark.parametrize(
    ("name", "kind"), [("llama tied", "folder"), ("apertus", "file"), ("gpt2", "file"), ("dots1", "folder")]
)
def test_transformers_finds_the_same_model_text_and_tie(name, kind, tmp_path, capsys):
    content = checkpoint(CASES[name])
    folder = export(save(content, tmp_path / "saved.ckpt", kind), tmp_path / "out")
    printed = capsys.readouterr().out
    assert re.search(r"differ from the decoder's by at most \d\.\de-0[6-9]|by at most 0\.0e\+00", printed), printed
    assert "token ids of a sample are the same" in printed
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    words = transformers.AutoTokenizer.from_pretrained(folder)
    inputs = words("def parse", return_tensors="pt")
    found = theirs.generate(**inputs, max_new_tokens=12)[0].tolist()
    decoder, saved = decoder_from_checkpoint(content), tokenizer_from_checkpoint(content)
    prompt = saved.encode("def parse")
    expected = [int(token) for token in generate_tokens(decoder, torch.tensor([prompt]), 12)]
    expected = expected[: expected.index(0) + 1] if 0 in expected else expected
    assert found == [*prompt, *expected]
    stored = load_file(folder / "model.safetensors")
    settings = json.loads((folder / "config.json").read_text())
    assert settings["tie_word_embeddings"] == ("lm_head.weight" not in stored) == CASES[name].tie_embeddings
    assert (settings["eos_token_id"], settings["dtype"]) == (0, "float32")
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 0
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize(
    ("to", "named", "tied", "start"),
    [("hf", "hf-tp", False, "runs/tp"), ("gguf", "tiny-gguf", True, r"runs/[^\n]*llama.cpp's")],
)
def test_the_page_shows_what_is_printed(to, named, tied, start, tmp_path, capsys):
    config = replace(CASES["apertus"], tie_embeddings=tied)
    export(save(checkpoint(config), tmp_path / "saved.ckpt"), tmp_path / "out", "--format", to)
    printed = capsys.readouterr().out.replace(str(tmp_path / "out"), named)
    page = (Path(__file__).parents[2] / "docs/export.md").read_text()
    (shown,) = re.findall(rf"```text\n({start}.*?)```", page, re.S)

    def form(text):
        return re.sub(r"[\d,.]*\d(e[+-]\d+| [KMG]iB)?", "#", re.sub(r"^\S+\.ckpt", "PATH", text, flags=re.M))

    assert form(printed) == form(shown)


def test_the_card_tells_recipe_data_figures_and_how_to_load(tmp_path):
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "metrics.csv").write_text(
        "step,train/loss,val/loss,val/bits_per_byte,val/ema_share\n0,9,,,\n1,,7.5,3.5,\n2,,6.25,2.5,1.0\n3,,5,1,\n"
    )
    folder = export(save(checkpoint(CASES["qwen3"]), run / "checkpoints/last.ckpt"), tmp_path / "out")
    card = (folder / "README.md").read_text()
    for line in (
        "| class | `Qwen3ForCausalLM` |",
        "| step | 3 |",
        "| training tokens | 384 |",
        "| training data | `text-12ab` |",
        "| validation loss | 6.2500, at step 3, of the average ema |",
        "| validation bits/byte | 2.5000, at step 3, of the average ema |",
        "seed_everything: 0",
        'AutoModelForCausalLM.from_pretrained(".")',
    ):
        assert line in card
    figures = figures_of_run(run / "checkpoints/x.ckpt", 2)
    assert (figures.step, figures.average, figures.values) == (2, None, {"val/loss": 7.5, "val/bits_per_byte": 3.5})
    assert figures_of_run(run / "checkpoints/x.ckpt", 1) is None


def test_the_card_counts_no_row_that_the_run_passed_over():
    """By hand: rows 0 to 9 and 20 to 24 of a span that skips 10 to 19, then 25 to 29 of one that skips 26 and 40."""
    spans = [
        {"step": 0, "sample": 0, "rows": 5, "skipped": [[10, 19]]},
        {"step": 3, "sample": 25, "rows": 2, "skipped": [[26, 26], [40, 40]]},
        {"step": 90, "sample": 99, "rows": 4, "skipped": []},  # of a batch that would have grown later
    ]
    state = {"data": "text", "samples": 30, "seq_len": 8, "history": spans}
    card = model_card("m", llama_cpp_target("llama"), 1, "fp32", {"D": state}, None, average=None, compared="")
    assert f"| training tokens | {(10 + 5 + 4) * 8} |" in card
    state["history"] = [{**spans[1], "sample": 20}]  # of the time before it, nothing is known
    card = model_card("m", llama_cpp_target("llama"), 1, "fp32", {"D": state}, None, average=None, compared="")
    assert f"| training tokens | {(20 + 9) * 8} |" in card


def test_the_name_of_a_special_token_is_one_id_in_transformers_unless_it_is_told_to_split_it(tmp_path):
    content = checkpoint(CASES["llama tied"])
    words = transformers.AutoTokenizer.from_pretrained(export(save(content, tmp_path / "a.ckpt"), tmp_path / "out"))
    here = tokenizer_from_checkpoint(content).encode("a <|endoftext|> b")
    assert 0 not in here
    assert words("a <|endoftext|> b")["input_ids"].count(0) == 1
    assert words("a <|endoftext|> b", split_special_tokens=True)["input_ids"] == here


def test_an_average_is_exported_in_place_of_the_weights(tmp_path):
    content = checkpoint(CASES["qwen3"])
    mean = {name: value + 1 for name, value in content["state_dict"].items()}
    content["averages"] = {"ema": {"weights": {"mean": mean}}}
    path = save(content, tmp_path / "saved.ckpt", "folder")
    folder = export(path, tmp_path / "out", "--average", "ema")
    found = load_file(folder / "model.safetensors")["model.norm.weight"]
    torch.testing.assert_close(found, content["state_dict"]["decoder.norm.weight"] + 1)
    assert "the average `ema`" in (folder / "README.md").read_text()
    with pytest.raises(UsageError, match=r"average=tail: .* holds no such average of the weights: it holds ema"):
        export(path, tmp_path / "other", "--average", "tail")


def test_facts_of_an_export_are_json_alone(tmp_path, capsys):
    path = save(checkpoint(Llama(**SIZES)), tmp_path / "run.ckpt")
    export(path, tmp_path / "hf", "--json", "-")
    said = capsys.readouterr()
    facts = json.loads(said.out)
    assert facts["largest_logit_difference"] < 1e-4
    assert (facts["folder"], facts["checkpoint"], facts["dtype"]) == (str(tmp_path / "hf"), str(path), "float32")
    assert facts["weights_bytes"] >= 4 * facts["parameters"] > 0
    assert f"{facts['tensors']} tensors" in said.err


def test_bf16_in_several_files_is_compared_with_the_rounded_weights(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("lightning_tricks.commands.export.export.FILE_BYTES", int(3e-5 * 2**30))
    path = save(checkpoint(CASES["gpt2"]), tmp_path / "saved.ckpt")
    folder = export(path, tmp_path / "out", "--dtype", "bf16")
    assert re.search(r"rounding to bfloat16 changed them by up to \d", capsys.readouterr().out)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(folder.glob("model-*.safetensors"))
    assert len(files) > 2
    assert {file.name for file in files} == set(index["weight_map"].values())
    stored = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    assert index["metadata"]["total_size"] == sum(2 * tensor.numel() for tensor in stored.values())
    sizes = [
        sum(2 * stored[name].numel() for name in stored if index["weight_map"][name] == file.name) for file in files
    ]
    largest = max(2 * tensor.numel() for tensor in stored.values())
    assert max(sizes) <= max(largest, 3e-5 * 2**30)


def test_mups_multipliers_are_folded(tmp_path, capsys):
    config = Llama(**(SIZES | {"d_model": 64}))
    mup = MuP(base_width=32)
    folder = export(save(checkpoint(config, mup=to_plain(mup)), tmp_path / "saved.ckpt"), tmp_path / "out")
    stored, raw = load_file(folder / "model.safetensors"), checkpoint(config)["state_dict"]
    torch.testing.assert_close(stored["lm_head.weight"], raw["decoder.head.weight"] / 2)
    assert torch.equal(stored["model.embed_tokens.weight"], raw["decoder.embed.weight"])


def test_without_a_tokenizer_it_says_so_and_has_no_ids(tmp_path, capsys):
    folder = export(save(checkpoint(CASES["qwen3"], TextData=None), tmp_path / "saved.ckpt"), tmp_path / "out")
    assert "no tokenizer: the checkpoint holds none" in capsys.readouterr().out
    settings = json.loads((folder / "config.json").read_text())
    assert settings["eos_token_id"] is settings["bos_token_id"] is settings["pad_token_id"] is None
    assert not list(folder.glob("tokenizer*"))
    assert "AutoTokenizer" not in (folder / "README.md").read_text()


def test_other_logits_other_tokens_and_another_tie_leave_no_folder(tmp_path, monkeypatch):
    path = save(checkpoint(CASES["qwen3"]), tmp_path / "saved.ckpt")
    ask, answers = verify_export.ask_fresh_process, []

    def spoilt(**changed):
        def spoil(*args):
            answers.append(answers[0] if answers else ask(*args))  # the same folder each time
            assert "transformers" in answers[0]["modules"]
            assert not {"lightning_tricks", "lightning", "pytorch_lightning"} & set(answers[0]["modules"])
            return answers[0] | {key: change(answers[0][key]) for key, change in changed.items()}

        monkeypatch.setattr("lightning_tricks.commands.export.export.ask_fresh_process", spoil)

    for changed, says in (
        ({"logits": lambda logits: logits + 0.01}, r"logits of transformers differ from the decoder's by 1\.00e-02"),
        ({"logits": lambda logits: logits * float("nan")}, r"differ from the decoder's by inf"),
        ({"ids": lambda ids: [*ids[:5], 1, *ids[6:]]}, "gives other ids than 'a small text', the first at token 5"),
        ({"eos": lambda eos: 7}, "the end of text is 7 in transformers and 0 in the checkpoint"),
        ({"tied": lambda tied: not tied}, "transformers ties the head: True, the decoder: False"),
        ({"wrong": lambda wrong: ["missing_keys: lm_head.weight"]}, r"other weights \(missing_keys: lm_head\.weight\)"),
    ):
        spoilt(**changed)
        with pytest.raises(UsageError, match=says) as refused:
            export(path, tmp_path / "out")
        assert "\n" not in str(refused.value)
        assert [file.name for file in tmp_path.iterdir()] == ["saved.ckpt"]


def test_a_tokenizer_that_hugging_face_cannot_express_is_one_line(tmp_path):
    record = tokenizer()
    for changed, says in (
        ({"json": "{}"}, "tokenizer 'a small text' of .* is none of the tokenizers library"),
        ({"eot_id": 5000}, "the tokenizer 'a small text' has no token 5000, its end of text"),
    ):
        path = save(checkpoint(CASES["qwen3"], TextData={"tokenizer": record | changed}), tmp_path / "saved.ckpt")
        with pytest.raises(UsageError, match=says) as refused:
            export(path, tmp_path / "out")
        assert "\n" not in str(refused.value)
    assert [file.name for file in tmp_path.iterdir()] == ["saved.ckpt"]


def test_a_folder_that_exists_and_wrong_options_are_one_line(tmp_path):
    path = save(checkpoint(CASES["qwen3"]), tmp_path / "saved.ckpt")
    (tmp_path / "there").mkdir()
    fit(Small(), max_steps=1).trainer.save_checkpoint(tmp_path / "small.ckpt")
    gated = save(checkpoint(GPT2(**SIZES, activation="swiglu")), tmp_path / "gated.ckpt")
    for given, output, options, says in (
        (path, "there", [], "output=.*there exists: name another folder"),
        (tmp_path / "small.ckpt", "out", [], "holds no decoder_config of a Llama or GPT2"),
        (gated, "out", [], "decoder.activation=swiglu: no GPT-2 of transformers has it"),
        (tmp_path / "no.ckpt", "out", [], "there is no such file"),
    ):
        with pytest.raises(UsageError, match=says) as refused:
            export(given, tmp_path / output, *options)
        assert "\n" not in str(refused.value)
    assert not (tmp_path / "out").exists()


def test_a_folder_that_another_process_is_writing_is_one_line_and_stays(tmp_path):
    path = save(checkpoint(CASES["qwen3"]), tmp_path / "saved.ckpt")
    staging = tmp_path / ".out.exporting"
    staging.mkdir()
    (staging / "model.safetensors").write_text("half of it")
    with locked(staging), pytest.raises(UsageError, match=r"out: another process is writing this folder: name"):
        export(path, tmp_path / "out")
    assert (staging / "model.safetensors").read_text() == "half of it"
    export(path, tmp_path / "out")  # a killed process holds no lock
    assert sorted(file.name for file in tmp_path.iterdir()) == ["out", "saved.ckpt"]


def test_an_older_transformers_or_none_is_one_line(tmp_path, monkeypatch):
    path = save(checkpoint(CASES["qwen3"]), tmp_path / "saved.ckpt")
    monkeypatch.setattr("lightning_tricks.commands.export.folder_files.version", lambda name: "4.57.1")
    with pytest.raises(UsageError, match=r"transformers 4\.57\.1 is too old: pip install -e '.\[hf\]' in the clone"):
        export(path, tmp_path / "out")
    monkeypatch.setattr("lightning_tricks.commands.export.folder_files.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"are needed to check what is written: pip install -e '.\[hf\]' in the clone"):
        export(path, tmp_path / "out")


# ---- from ranks, and back to them


def losses(model, start, folder, strategy, devices):
    """Losses of two steps of a new run."""
    batch = {"input_ids": torch.arange(64).view(2, 32) % 280, "labels": torch.arange(1, 65).view(2, 32) % 280}
    torch.manual_seed(5)
    trainer = trainer_with(
        *start, devices=devices, strategy=strategy, max_steps=2, log_every_n_steps=1, use_distributed_sampler=False
    )
    trainer.fit(model, torch.utils.data.DataLoader([batch] * 2, batch_size=None))
    if folder is not None:
        trainer.save_checkpoint(folder)
    return [values["train/loss"] for _, values in trainer.logger.rows if "train/loss" in values]


def on_four_ranks(rank, saved, exported, executable):
    sys.executable = executable

    def fit_from(*start, saved=None):
        model = LanguageModel(CASES["llama tied"], optimizer=lambda groups: torch.optim.AdamW(groups, lr=1e-2))
        return losses(model, start, saved, FSDP2Strategy(mesh=ParallelDims(shard=2, tensor=2)), 4)

    fit_from(saved=saved)
    if rank == 0:
        export(saved, exported)
    torch.distributed.barrier()
    return [fit_from(InitFrom(path)) for path in (saved, exported)]


def test_shards_of_ranks_are_exported_and_go_on_from_the_folder_with_equal_losses(tmp_path):
    paths = tmp_path / "saved.ckpt", tmp_path / "out"
    from_shards, from_folder = run_processes(on_four_ranks, *paths, fresh_python(), world=4)[0]
    assert len(from_shards) == 2
    assert from_folder == from_shards
    alone = [losses(LanguageModel(CASES["llama tied"]), [InitFrom(path)], None, "auto", 1) for path in paths]
    assert alone[0] == alone[1]
    assert alone[0][0] == pytest.approx(from_shards[0], rel=1e-5)
