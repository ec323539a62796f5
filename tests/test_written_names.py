"""Each writer writes the names of others so that they are read back as these names."""

import json
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from commands.exported import SIZES, tokenizer
from jsonargparse import ArgumentParser
from models.decoders import build
from safetensors import safe_open

from lightning_tricks import Llama
from lightning_tricks import __main__ as door
from lightning_tricks._core.errors import UsageError, one_line_and_exit
from lightning_tricks._core.quote import printable
from lightning_tricks._trainer.lightning import rank_zero_info, rank_zero_warn
from lightning_tricks.cli.next_steps import go_on
from lightning_tricks.commands.doctor import Report
from lightning_tricks.commands.export.folder_files import Entry, write_weights
from lightning_tricks.commands.export.model_card import model_card, transformers_target
from lightning_tricks.commands.runs import Table
from lightning_tricks.logs.finding import Finding
from lightning_tricks.logs.ledger_file import LedgerFile, parse
from lightning_tricks.logs.run import Run
from lightning_tricks.logs.run_log import RunLog, Series
from lightning_tricks.models import hf_config, to_hf
from lightning_tricks.monitors.goodput_monitor import FILE
from lightning_tricks.monitors.tensorboard_dashboard import table

ATTACK = "hf\nckpt_path: evil.ckpt\nweights_only: false\n#"
NAMES = [
    ATTACK, "a'b\"c # d: e", "\x1b[2J\x1b]0;x\x07", "\u2028\u202e", "\udcff", "`|<b>$(x)`", "{x}, [y]: &z", "null",
    "1e3",
]  # fmt: skip
names = pytest.mark.parametrize("name", NAMES)
utf8_names = pytest.mark.parametrize("name", [name for name in NAMES if name != "\udcff"])  # safetensors opens these


def as_setting(value: str) -> str | None:
    """What a setting of a recipe is for a parser, which reads some texts again, as `null`, quoted or not."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--setting", type=str | None)
    return parser.parse_object({"setting": value}).setting


def is_printable(text: str) -> bool:
    return all(map(str.isprintable, text.split("\n")))


@pytest.fixture(scope="module")
def folder_of_hf(tmp_path_factory):
    """A small folder of Hugging Face, without its own libraries."""
    folder = tmp_path_factory.mktemp("hf")
    config = Llama(**SIZES)
    state = to_hf(build(config).state_dict(), config)
    entries = [Entry(name, tuple(each.shape), each.dtype, lambda each=each: each) for name, each in state.items()]
    write_weights(entries, folder, 10**9)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **hf_config(config)}))
    (folder / "tokenizer.json").write_text(tokenizer()["json"])
    return folder


@utf8_names
def test_import_writes_the_folders_name_and_no_setting_of_it(folder_of_hf, tmp_path, monkeypatch, capsys, name):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(folder_of_hf, name)
    door.run(["import", name, "--output", "mine.yaml"])
    text = Path("mine.yaml").read_text(encoding="utf-8")
    recipe = yaml.safe_load(text)
    assert recipe.keys() == {"seed_everything", "init_from", "model", "data", "trainer"}
    settings = as_setting(recipe["init_from"]), as_setting(recipe["data"]["init_args"]["tokenizer"])
    assert [setting and os.path.normpath(setting) for setting in settings] == [name, name]
    assert as_setting(recipe["trainer"]["logger"]["init_args"]["name"]) == f"import_{name}"
    assert is_printable(text)
    said = capsys.readouterr().out
    assert is_printable(said)
    assert said.startswith(f"{printable(name)}: LlamaForCausalLM")


@names
def test_an_error_is_one_line(capsys, name):
    with pytest.raises(SystemExit), one_line_and_exit():
        raise UsageError(f"option={name}: no such file")
    said = capsys.readouterr().err
    assert said == f"error: option={printable(name)}: no such file\n"
    assert said.removesuffix("\n").isprintable()


@names
def test_a_line_of_the_log_is_one_line(caplog, name):
    with caplog.at_level("INFO"):
        rank_zero_info(f"from {name}")
    assert caplog.messages == [f"from {printable(name)}"]
    with pytest.warns(UserWarning, match=re.escape(printable(name)) + "$"):
        rank_zero_warn(f"from {name}")


@names
def test_a_command_to_go_on_is_one_line(name):
    trainer = SimpleNamespace(logger=None, default_root_dir=".")
    line = go_on(trainer, ["--config", name], f"runs/{name}")
    assert line.isprintable()
    assert line.endswith(f"--ckpt_path {line.rpartition('--ckpt_path ')[2]}")


@names
def test_a_model_card_has_no_mark_up_of_a_name(name):
    checkpoint = {
        "global_step": name,
        "TextData": {"data": name, "content": f"{name}```"},
        "lightning_tricks": {"recipe": f"a: 1\n```\n# {name}", "average_of": [[name, 0.5]]},
    }
    card = model_card(name, transformers_target("LlamaForCausalLM", True), 1, "fp32", checkpoint, None, average=name,
                      compared="")  # fmt: skip
    front = card.split("---\n")[1]
    assert yaml.safe_load(front) == {"library_name": "transformers", "pipeline_tag": "text-generation"}
    assert card.startswith("---\n")
    assert is_printable(card)
    outside = re.sub(r"(?ms)^(`{3,})\w*\n.*?\n\1$", "", card)  # without blocks of code
    headings = [line for line in outside.split("\n") if line.startswith("#")]
    assert len(headings) == 3
    rows = [line for line in outside.split("\n") if line.startswith("|")]
    assert all(len(re.findall(r"(?<!\\)\|", row)) == 3 for row in rows)
    assert "<b>" not in re.sub(r"(`+).*?\1", "", outside)


@names
def test_tensorboards_texts_have_no_mark_up_of_a_name(name):
    text = table({name: name, "other": 1})
    assert text.count("\n") == 3
    assert is_printable(text)
    assert all(len(re.findall(r"(?<!\\)\|", row)) == 3 for row in text.split("\n"))


@names
def test_a_table_of_runs_has_one_line_and_one_record_a_run(name):
    runs = [Run(name, "stopped", settings={f"a.{name}": name}), Run("other", "stopped", settings={f"a.{name}": 2})]
    found = Table(runs)
    assert len(found.text().split("\n")) == 3
    assert is_printable(found.text())
    assert {record["name"] for record in json.loads(json.dumps(found.records()))} == {name, "other"}


@names
def test_a_report_of_doctor_has_no_tag_and_no_line_of_a_name(name):
    log = RunLog({name: Series(np.arange(3), np.ones(3))})
    finding = Finding("spike", "error", "established", f"in {name}", f"of {name}", f"do {name}", (name,), (1,))
    plain = Finding("spike", "error", "established", "in a", "of a", "do a", (name,), (1,))
    one, other = (Report(each, log, [found], [each]) for each, found in ((name, finding), ("a", plain)))
    assert is_printable(one.text())
    assert one.text().count("\n") == other.text().count("\n")
    assert one.html().count("<") == other.html().count("<")
    assert one.html().encode("utf-8")


@names
def test_files_of_json_give_the_name_back(tmp_path, name):
    ledger = LedgerFile(tmp_path / "ledger.jsonl")
    ledger.append([{"start": 0, "strategy": name}])
    values, _, follows = parse((tmp_path / "ledger.jsonl").read_text().removesuffix("\n"), "")
    assert (values, follows) == ({"start": 0, "strategy": name}, True)
    write_weights([Entry(f"x{printable(name)}", (2,), torch.float32, lambda: torch.ones(2))], tmp_path, 100)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert list(file.keys()) == [f"x{printable(name)}"]
    assert FILE.isprintable()
