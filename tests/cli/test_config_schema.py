"""The JSON schema of recipes: each recipe of ours is valid, a mistake is not."""

import copy
import json

import jsonschema
import pytest
import yaml

from lightning_tricks import __main__ as door
from lightning_tricks._core.errors import UsageError
from lightning_tricks.commands import recipes_folder

pytestmark = pytest.mark.long  # the schema takes seconds
RECIPES = sorted(recipes_folder().rglob("*.yaml"))
TINY = yaml.safe_load((recipes_folder() / "tiny.yaml").read_text("utf-8"))


@pytest.fixture(scope="module")
def schema(tmp_path_factory):
    file = tmp_path_factory.mktemp("schema") / "recipe.json"
    door.run(["config-schema", "--json", str(file)])
    schema = json.loads(file.read_text("utf-8"))
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


def test_an_editor_shows_help_and_defaults(schema):
    classes = schema["$defs"]["Callback"]["anyOf"]
    names = [each["properties"]["class_path"].get("enum", [None])[0] for each in classes if "properties" in each]
    assert len(names) == len({*names})
    guard = classes[1 + names.index("StepGuard")]
    assert guard["description"].startswith("Changes training: a step")
    window = guard["properties"]["init_args"]["properties"]["window_steps"]
    assert window["default"] > 0
    assert window["description"]
    assert "params" not in json.dumps(schema["$defs"]["Optimizer"]["anyOf"][1]["properties"]["init_args"]["properties"])


def test_without_a_file_standard_output_has_the_schema_alone(schema, capsys):
    door.run(["config-schema"])
    assert json.loads(capsys.readouterr().out) == schema
    with pytest.raises(UsageError, match=r"^config-schema: json=.*no/such"):
        door.run(["config-schema", "--json", "no/such/file"])
