"""A schedule in a recipe: short class names, nested in a model, and help for each option."""

import dataclasses
import inspect

import pytest
from jsonargparse import ArgumentParser

from lightning_tricks import schedules
from lightning_tricks._core.errors import UsageError
from lightning_tricks.schedules import Schedule, WarmupStableDecay


class Model:
    def __init__(self, schedule: Schedule | None = None):
        self.schedule = schedule


@pytest.fixture
def parser():
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--schedule", type=Schedule)
    parser.add_class_arguments(Model, "model")
    return parser


def read(parser, settings):
    return parser.instantiate(parser.parse_object(settings))


def test_a_schedule_nests_in_a_model_and_is_none_by_default(parser):
    settings = {"warmup_steps": 3, "decay_shape": "linear", "decay_fraction": 0.5}
    recipe = {"model": {"schedule": {"class_path": "WarmupStableDecay", "init_args": settings}}}
    assert read(parser, recipe).model.schedule == WarmupStableDecay(**settings)
    assert read(parser, {}).model.schedule is None


def test_a_bad_value_keeps_its_one_line(parser):
    recipe = {"schedule": {"class_path": "WarmupCosine", "init_args": {"warmup_steps": -4}}}
    with pytest.raises(UsageError, match=r"^WarmupCosine\.warmup_steps=-4: [^\n]*$"):
        read(parser, recipe)


@pytest.mark.parametrize("name", [name for name in vars(schedules) if name.startswith(("Warmup", "Cosine", "Power"))])
def test_every_option_of_every_schedule_is_described(name):
    cls = getattr(schedules, name)
    described = inspect.getdoc(cls).partition("Args:")[2]
    assert all(f"\n    {field.name}: " in described for field in dataclasses.fields(cls))
