"""What the parser takes and refuses, without a whole command line."""

import inspect
from typing import Any

import jsonargparse
import pytest
import yaml
from harness.models import Small

from lightning_tricks._core.suggest import _WORDS_FOR, SYNONYMS, did_you_mean
from lightning_tricks._trainer.lightning import STRATEGY_NAMES, pl
from lightning_tricks.cli import RecipeCLI, recipe_parser
from lightning_tricks.cli.recipe_cli import RecipeTrainer
from lightning_tricks.cli.recipe_parser import RecipeParser, join_negative_numbers, load_text, nameable_classes


@pytest.fixture(scope="module")
def parser() -> RecipeParser:
    parser = RecipeParser()
    parser.add_lightning_class_args(RecipeTrainer, "trainer")
    return parser


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("FSDP2Strategy", "timeout_seconds", "60"), ("DDPStrategy", "process_group_backend", "gloo"),
        ("fsdp2", "timeout_seconds", "60"), ("deepspeed_zero", "stage", "2"),
    ],
)  # fmt: skip
def test_a_strategy_is_named_by_its_class_or_as_lightning_registers_it(parser, name, option, value):
    class_name = STRATEGY_NAMES.get(name, name)  # so that `plan` and `check` see the class of our own names, too
    with recipe_parser.known_names_first():
        arguments = parser.parse_args(["--trainer.strategy", name, f"--trainer.strategy.{option}", value])
        assert parser.parse_args(["--trainer.strategy", "ddp"]).trainer.strategy == "ddp"
        recipe = parser.parse_string(f"trainer: {{strategy: {name}}}")
    assert arguments.trainer.strategy.class_path.endswith(f".{class_name}")
    assert recipe.trainer.strategy.class_path.endswith(f".{class_name}")


@pytest.mark.parametrize("number", ["-1", "-.5", "-2.5E+7", "-.inf"])
def test_a_negative_number_is_a_value(number):
    assert join_negative_numbers(["fit", "--lr", number, "--x"]) == ["fit", f"--lr={number}", "--x"]


@pytest.mark.parametrize("args", [["--a", "-c", "x"], ["--a=1", "-1"], ["-1"], ["--a", "--b"], ["fit", "-1e-3"]])
def test_what_is_no_value_of_an_option_stays_where_it_is(args):
    assert join_negative_numbers(args) == args


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a: 1\nb: 2\na: 3\n", "r.yaml, lines 1 and 3: 'a' is there twice"),
        ("t:\n  c: 1\n  c: 1\n", "r.yaml, lines 2 and 3: 't.c' is there twice"),
        ("t:\n- x: {c: 1, c: 2}\n", "r.yaml, line 2: 't.x.c' is there twice"),
        ("m: {class_path: A, init_args: {d: {class_path: B, w: 1}}}", "line 1: 'm.d.w' is beside class_path"),
    ],
)
def test_a_mistake_of_a_recipes_text_names_its_line(text, line):
    with pytest.raises(yaml.YAMLError) as error:
        load_text(text, "r.yaml")
    assert line in str(error.value)
    assert "\n" not in str(error.value)


def test_a_recipe_may_repeat_a_key_in_two_places_and_merge_twice():
    text = "x: &x {a: 1}\ny: &y {b: 2}\nz: {<<: *x, <<: *y, c: 3}\nw: {a: 1}\n"
    assert load_text(text, "r.yaml")["z"] == {"a": 1, "b": 2, "c": 3}


def test_each_synonym_leads_to_something_that_exists():
    classes = nameable_classes()
    options = {name for parameters in classes.values() for name in parameters}
    top = {"ckpt_path", "init_from", "resume", "seed_everything", "total_tokens"}
    trainer = inspect.signature(pl.Trainer.__init__).parameters
    values = {"bf16-mixed", "16-mixed", "32-true"}
    assert len(SYNONYMS) == sum(len(words.split()) for words in _WORDS_FOR.values()), "a word stands in two rows"
    for word, meanings in SYNONYMS.items():
        assert word == word.lower().replace("_", "").replace("-", "")
        for meaning in meanings:
            group, _, last = meaning.rpartition(".")
            known = trainer if group == "trainer" else classes.keys() | options | top | values
            assert last in known, (word, meaning)


def test_a_name_is_found_by_meaning_before_spelling():
    assert did_you_mean("WSD", ["SGD", "WarmupStableDecay"]) == "; did you mean WarmupStableDecay?"
    assert did_you_mean("every_n_steps", ["every_n_epochs", "every_n_train_steps"]).endswith("every_n_train_steps?")
    assert did_you_mean("LR", ["lr", "betas"]) == "; did you mean lr?"
    assert did_you_mean("qwxyz", ["lr", "betas"]) == ""
    assert did_you_mean("learning_rate", ["decoder"]) == ""
    assert did_you_mean("learning_rate", ["decoder"], places=True) == "; did you mean model.optimizer.lr?"


def test_settings_are_written_as_yaml_once_for_all_who_ask_and_anew_when_they_change(monkeypatch):
    parser, written = RecipeParser(), []
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--name", type=str | None, default=None)
    real = recipe_parser.lightning_cli.LightningArgumentParser.dump
    monkeypatch.setattr(
        recipe_parser.lightning_cli.LightningArgumentParser, "dump",
        lambda *args, **kwargs: written.append(kwargs) or real(*args, **kwargs),
    )  # fmt: skip
    config = parser.parse_args(["--steps", "3"])
    whole = parser.dump(config, skip_none=False)
    assert parser.dump(config, skip_none=False, skip_validation=False) is whole
    assert "steps: 3" in whole
    assert "name: null" in whole
    assert len(written) == 1
    assert "name" not in parser.dump(config, skip_none=True)
    config.steps = 4
    assert "steps: 4" in parser.dump(config, skip_none=False)
    assert len(written) == 3


def test_a_recipe_with_anchors_is_saved_without_aliases():
    """As a run's config.yaml, which `runs`, `compare` and `doctor` read without them."""
    parser = jsonargparse.ArgumentParser(parser_mode=recipe_parser.PARSER_MODE)
    for name, kind in (("a", list[float]), ("b", list[float]), ("c", Any), ("d", dict)):
        parser.add_argument(f"--{name}", type=kind)
    saved = parser.dump(parser.parse_string("a: &x [1, 2]\nb: *x\nc: *x\nd: {e: *x, f: *x}\n"))
    assert "*" not in saved
    assert yaml.safe_load(saved)["d"] == {"e": [1, 2], "f": [1, 2]}


class Wide(Small):
    """A module whose width the data decide."""

    def __init__(self, width: int = 1):
        super().__init__()
        self.width = width


class Rows(pl.LightningDataModule):
    """Knows the width as its argument and as an attribute."""

    def __init__(self, width: int = 2):
        super().__init__()
        self.width, self.columns = width, 10 * width


@pytest.mark.parametrize(
    ("source", "target", "on", "width"),
    [
        ("data.width", "model.width", "parse", 7),
        (("data.width",), "model.width", "parse", 7),
        ("data.init_args.width", "model.init_args.width", "parse", 7),
        ("data.columns", "model.width", "instantiate", 70),
    ],
)
@pytest.mark.parametrize("classes", [(Wide, Rows), ()], ids=["classes", "any class"])
def test_arguments_of_model_and_data_are_linked_as_by_lightning(source, target, on, width, classes):
    class Linked(RecipeCLI):
        def add_arguments_to_parser(self, parser):
            parser.link_arguments(source, target, apply_on=on)

    named = ["--model", f"{__name__}.Wide", "--data", f"{__name__}.Rows"]
    built = Linked(*classes, args=[*named, "--data.width=7"], run=False)
    assert (built.model.width, built.datamodule.width) == (width, 7)
