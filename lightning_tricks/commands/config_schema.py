"""`config-schema`: a JSON schema of recipes, with which an editor completes and checks them, of the parser's types."""

from collections.abc import Callable
from typing import Any

from jsonargparse import _completions_jsonschema as schemas

from lightning_tricks.commands import CommandParser
from lightning_tricks.commands.answers import check_json, write_json


class _RecipeSchema(schemas.ParserJsonschema):
    """jsonargparse's, with short names of the classes of some bases and packages; others by their path, unchecked."""

    bases: tuple[type, ...]
    packages: tuple[str, ...]

    def subclass_def(self, class_type: type, action: Any) -> Any:
        paths = schemas.get_all_subclass_paths(class_type) if schemas.is_subclass(class_type, self.bases) else []
        known = [path for package in reversed(self.packages) for path in paths if path.startswith(f"{package}.")]
        names = {path.rpartition(".")[2]: path for path in known}  # of two with one name, that of the first package
        found = [{"type": "string"}, self.unknown_class_path_schema()]
        if names:
            found[1]["properties"]["class_path"] |= {"pattern": r"\.", "not": {"enum": [*names.values()]}}
        for name, path in names.items():
            found.append(self.class_path_schema(path, action))
            found[-1]["properties"]["class_path"] = {"enum": [name, path]}
        return {"anyOf": found}

    def set_dest(self, schema: Any, dest: str, *rest: Any) -> None:
        if dest != "params":  # of an optimizer, which no recipe sets
            super().set_dest(schema, dest, *rest)


def run(args: list[str], cli: Callable[[], Any], bases: tuple[type, ...], packages: tuple[str, ...]) -> None:
    """Write the schema."""
    options = CommandParser(
        "lightning-tricks config-schema",
        description="Write a JSON schema of recipes. An editor with yaml-language-server then completes and checks a "
        "recipe that begins with `# yaml-language-server: $schema=FILE`.",
    )
    options.add_argument("--json", metavar="FILE", default="-", help="default: standard output")
    file = options.parse_args(args).json
    writer = _RecipeSchema()
    writer.bases, writer.packages = bases, packages
    with check_json("config-schema", file):
        schema = writer.generate(cli().parser)
    del schema["required"]  # a recipe may have several files
    settings = schema["properties"]
    settings["trainer"]["properties"]["callbacks+"] = settings["trainer"]["properties"]["callbacks"]
    settings["trainer"] = {"anyOf": [{"type": "string"}, settings["trainer"]]}  # a file of settings
    write_json(file, schema)
