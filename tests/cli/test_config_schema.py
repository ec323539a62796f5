"""The JSON schema of recipes: each recipe of ours is valid, a mistake is not."""

import copy
import json
import subprocess
import sys

import jsonschema
import pytest
import yaml

from lightning_tricks.commands import recipes_folder

pytestmark = pytest.mark.long  # the schema takes seconds
RECIPES = sorted(recipes_folder().rglob("*.yaml"))
TINY = yaml.safe_load((recipes_folder() / "tiny.yaml").read_text("utf-8"))


def config_schema(*options):
    """The command in a process of its own: in this one, tests and libraries have made classes that no module has."""
    command = [sys.executable, "-m", "lightning_tricks", "config-schema", *options]
    return subprocess.run(command, capture_output=True, text=True, cwd=recipes_folder().parent)


@pytest.fixture(scope="module")
def schema():
    done = config_schema()
    assert done.returncode == 0, done.stderr
    schema = json.loads(done.stdout)
    jsonschema.Draft202012Validator.check_schema(schema)
    return schema


def is_valid(schema, recipe):
    return jsonschema.Draft202012Validator(schema).is_valid(recipe)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_each_recipe_is_valid(schema, path):
    assert is_valid(schema, yaml.safe_load(path.read_text("utf-8")))


def changed(place, value):
    recipe = copy.deepcopy(TINY)
    *groups, name = place.split(".")
    group = recipe
    for each in groups:
        group = group[each]
    group[name] = value
    return recipe


OPTIMIZER = {"class_path": "AdamW", "init_args": {"lr": 1e-3}}


@pytest.mark.parametrize(
    ("place", "value", "valid"),
    [
        ("seed_everythin", 0, False),
        ("trainer.max_step", 5, False),
        ("trainer.max_steps", "many", False),
        ("trainer.max_steps", 5, True),
        ("trainer", "parts/short.yaml", True),
        ("trainer.callbacks+", ["StepGuard"], True),
        ("model.init_args.optimizr", OPTIMIZER, False),
        ("model.init_args.optimizer", OPTIMIZER, True),
        ("model.init_args.optimizer", {"class_path": "torch.optim.AdamW", "init_args": {"lr": 1e-3}}, True),
        ("model.init_args.optimizer", {"class_path": "AdamW", "init_args": {"learning_rate": 1e-3}}, False),
        ("model.init_args.optimizer", {"class_path": "torch.optim.AdamW", "init_args": {"lrr": 1}}, False),
        ("model.init_args.optimizer", {"class_path": "my.package.AdamW", "init_args": {"learning_rate": 1e-3}}, True),
        ("model.init_args.schedule", {"class_path": "WSD", "init_args": {"warmup_steps": 3}}, True),
        ("model.init_args.schedule", {"class_path": "WSD", "init_args": {"warmup_step": 3}}, False),
        ("model.init_args.decoder", {"class_path": "Lama", "init_args": {}}, False),
        ("model.init_args.decoder.init_args.n_layer", 3, False),
        ("data.init_args.seq_length", 3, False),
        ("trainer.callbacks", [{"class_path": "SafeCheckpoint", "init_args": {"every_n_steps": 5}}], False),
        ("trainer.strategy", {"class_path": "FSDP2Strategy", "init_args": {"mesh": {"tensor": 2}}}, True),
        ("trainer.strategy", {"class_path": "FSDP2Strategy", "init_args": {"mesh": {"tensr": 2}}}, False),
        ("model", {"class_path": "my.Model", "init_args": {"width": 3}}, True),
    ],
)
def test_a_mistake_is_marked(schema, place, value, valid):
    assert is_valid(schema, changed(place, value)) == valid


def test_standard_output_has_the_schema_alone(tmp_path, schema):
    done = config_schema("--json", str(tmp_path / "schema.json"))
    assert (done.returncode, done.stdout) == (0, "")
    assert json.loads((tmp_path / "schema.json").read_text("utf-8")) == schema


def test_an_editor_shows_help_and_defaults(schema):
    guard, adamw = settings(schema, "Callback", "StepGuard"), settings(schema, "Optimizer", "AdamW")
    assert guard["window_steps"]["default"] > 0
    assert guard["window_steps"]["description"]
    assert {"lr", "betas"} < adamw.keys()
    assert "params" not in adamw


def settings(schema, base, name):
    """Those of the one class of a name."""
    classes = [each.get("properties", {}) for each in schema["$defs"][base]["anyOf"]]
    (found,) = (each for each in classes if name in each.get("class_path", {}).get("enum", ()))
    return found["init_args"]["properties"]


def test_a_file_gets_the_same_and_one_that_cannot_be_written_is_one_line(schema, tmp_path):
    file = tmp_path / "recipe.json"
    assert config_schema("--json", str(file)).returncode == 0
    assert json.loads(file.read_text("utf-8")) == schema
    done = config_schema("--json", "no/such/file")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("error: config-schema: json=")
