"""Arguments to make a public class with in a test: from its signature, and where it needs more, from its docstring."""

import ast
import doctest
import inspect
import typing
from typing import Any


def arguments_needed(cls: type) -> dict[str, Any]:
    """The fewest arguments: none where each parameter has a default, else those of the docstring's first example.

    Raises:
        TypeError: a parameter has neither a default nor a value in an example.
    """
    example = next((given for given, _ in _examples(cls)), {})
    needed = any(each.default is each.empty for each in inspect.signature(cls).parameters.values())
    inspect.signature(cls).bind(**example)
    return example if needed else {}


def arguments_to_try(cls: type) -> list[dict[str, Any]]:
    """One entry for each case in which to try a class.

    They are those of the examples in its docstring, or its defaults where it has no example; and with the first of
    these each other value of an option whose type is `Literal`. An example with `# doctest: +SKIP` needs what a test
    machine lacks: a class that has no other one has no case.

    Raises:
        TypeError: as `arguments_needed`.
    """
    arguments_needed(cls)
    examples = _examples(cls)
    cases = [given for given, runs in examples if runs] if examples else [{}]
    options, parameters = typing.get_type_hints(cls.__init__), inspect.signature(cls).parameters
    for name in parameters if cases else ():
        used = cases[0].get(name, parameters[name].default)
        cases += [cases[0] | {name: value} for value in _choices(options.get(name)) if value != used]
    return cases


def _examples(cls: type) -> list[tuple[dict[str, Any], bool]]:
    """The arguments of each example in the docstring that calls the class, and whether it can run anywhere."""
    found = []
    for example in doctest.DocTestParser().get_examples(cls.__doc__ or ""):
        for call in (node for node in ast.walk(ast.parse(example.source)) if isinstance(node, ast.Call)):
            if isinstance(call.func, ast.Name) and call.func.id == cls.__name__:
                named = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords if keyword.arg}
                bound = inspect.signature(cls).bind_partial(*map(ast.literal_eval, call.args), **named)
                found.append((bound.arguments, doctest.SKIP not in example.options))
    return found


def _choices(option: Any) -> tuple[Any, ...]:
    """The values of a `Literal`, also of one that may be None."""
    parts = (option, *typing.get_args(option))
    return next((typing.get_args(part) for part in parts if typing.get_origin(part) is typing.Literal), ())
