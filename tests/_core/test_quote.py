"""What is written from a name of somebody else is read back as that name, and is nothing else."""

import html
import os
import re
import subprocess

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from lightning_tricks._core.quote import (
    error_line,
    html_text,
    markdown_block,
    markdown_code,
    markdown_text,
    printable,
    shell_line,
    shell_word,
    yaml_text,
)

NAMES = [
    "plain", "é 你好 😀", "", "a\nb: c\n#", "hf\nckpt_path: evil.ckpt\nweights_only: false\n#", 'two"quotes', "it's",
    "# x: y", "- a", "null", "1e3", "true", "{a: 1}", "*a", "&b", "!!python/object:x", "a\rb", "\x1b[2J\x1b]52;c;\x07",
    "\u2028 \u2029 \x85", "\u202e\u2066", "\udcff\udc80", "a\\nb", "$(touch x)", "`touch x`", "<script>", "tab\t", " ",
    "x" * 4096, "\ufeff", "\U000e0001", "\x7f\x9b31m",
]  # fmt: skip
any_name = st.text() | st.sampled_from(NAMES)


def is_one_line(text: str) -> bool:
    return text.isprintable()


@given(any_name)
def test_a_line_for_people_is_one_line_without_escape_sequences(name):
    assert is_one_line(printable(name))
    assert is_one_line(error_line(name))
    assert (printable(name) == name) == name.isprintable()


def test_an_error_line_keeps_its_beginning_and_its_end():
    line = error_line("option: " + "x" * 10_000 + ": remedy")
    assert line.startswith("option: xxx")
    assert line.endswith("xxx: remedy")
    assert len(line) < 5_000


@given(any_name)
def test_yaml_gives_the_same_text_behind_a_name_and_in_braces(name):
    text = yaml_text(name, one_line=True)
    assert is_one_line(text)
    assert yaml.safe_load(f"before: 1\nname: {text}\nafter: 2") == {"before": 1, "name": name, "after": 2}
    assert yaml.safe_load(f"{{name: {text}, after: [{text}]}}") == {"name": name, "after": [name]}


@given(any_name, any_name)
def test_yaml_of_settings_is_read_as_these_settings(name, value):
    settings = {name: value, "list": [value, 1, 0.5, None, True]}
    text = yaml_text(settings)
    assert yaml.safe_load(text) == settings
    assert all(map(is_one_line, text.split("\n")))


def test_yaml_keeps_the_letters_of_all_languages():
    assert yaml_text("é 你好", one_line=True) == "é 你好"


@pytest.mark.long
def test_a_shell_gets_the_same_bytes_and_runs_nothing(tmp_path):
    line = shell_line(["printf", "%s\\0", *NAMES])
    assert is_one_line(line)
    done = subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, check=True)
    assert done.stdout.split(b"\0")[:-1] == [os.fsencode(name) for name in NAMES]
    assert not list(tmp_path.iterdir())


def test_a_plain_word_of_a_shell_stays_as_it_is():
    assert (shell_word("runs/tiny"), shell_word("a b")) == ("runs/tiny", "'a b'")


@given(any_name)
def test_html_gives_the_printable_text_and_no_tag(name):
    text = html_text(name)
    assert not set("<>\"'") & set(text)
    assert html.unescape(text) == printable(name)


@given(any_name)
def test_markdown_has_no_mark_of_a_name_unescaped(name):
    text = markdown_text(name)
    assert re.sub(r"\\([\\`*\[\]<>|&~#!$_])", r"\1", text) == printable(name)
    assert not re.search(r"(?<!\\)(\\\\)*[`<>\[\]|*]", text)


@pytest.mark.parametrize("name", ["a", "`", "``x```", "a|b", "<b>", "x\n```\n# y"])
def test_code_in_markdown_ends_behind_the_name(name):
    text = markdown_code(name)
    marks = re.match("`+", text)[0]
    inside = text[len(marks) : -len(marks)]
    assert marks not in inside
    assert inside.strip().replace("\\|", "|") == printable(name)
    block = markdown_block(name, "yaml")
    fence = re.match("`+", block)[0]
    assert block.count(fence) == 2
    assert block.removeprefix(f"{fence}yaml\n").removesuffix(f"\n{fence}") == name
