"""The Lightning package that an object is of: its classes by name, its Python modules."""

import importlib
from typing import Any


def is_a(instance: Any, *class_names: str) -> bool:
    """Whether an object is of a class with one of these names: `isinstance` would ask for one Lightning package."""
    return any(cls.__name__ in class_names for cls in type(instance).__mro__)


def lightning_file(trainer: Any, name: str) -> Any:
    """Lightning's Python module `name`, such as `trainer.call`, from the package that a Trainer is of."""
    classes = (cls.__module__ for cls in type(trainer).__mro__)
    package = next(module for module in classes if module.endswith(".trainer.trainer")).removesuffix(".trainer.trainer")
    return importlib.import_module(f"{package}.{name}")
