"""`config-schema`: a JSON schema of recipes, with which an editor completes and checks them, of the parser's types."""

from typing import Any

from jsonargparse import Namespace
from jsonargparse import _completions_jsonschema as schemas

from lightning_tricks.cli.recipe_cli import RecipeCLI
from lightning_tricks.cli.recipe_parser import ALIASES, CLASS_BASES, PACKAGE_ORDER
from lightning_tricks.commands import CommandParser
from lightning_tricks.commands.answers import check_json, write_json


class _RecipeSchema(schemas.ParserJsonschema):
    """jsonargparse's, with the short names of a recipe's classes; others stand there by their path, unchecked."""

    def subclass_def(self, class_type: type, action: Any) -> Any:
        paths = schemas.get_all_subclass_paths(class_type) if schemas.is_subclass(class_type, CLASS_BASES) else []
        known = [path for package in reversed(PACKAGE_ORDER) for path in paths if path.startswith(f"{package}.")]
        names = {path.rpartition(".")[2]: path for path in known}  # of two with one name, that of the first package
        found = [{"type": "string"}, self.unknown_class_path_schema()]
        if names:
            found[1]["properties"]["class_path"] |= {"pattern": r"\.", "not": {"enum": [*names.values()]}}
        for name, path in names.items():
            found.append(self.class_path_schema(path, action))
            found[-1]["properties"]["class_path"] = {"enum": [name, path, *(a for a in ALIASES if ALIASES[a] == name)]}
        return {"anyOf": found}

    def set_dest(self, schema: Any, dest: str, *rest: Any) -> None:
        if dest != "params":  # of an optimizer, which no recipe sets
            super().set_dest(schema, dest, *rest)


class _ParserOnly(RecipeCLI):
    def parse_arguments(self, parser: Any, args: Any) -> None:
        self.config, self.parser = Namespace(subcommand=None, seed_everything=False), self._parser("fit")

    def instantiate_classes(self) -> None:
        pass


def run(args: list[str]) -> None:
    """Write the schema."""
    options = CommandParser(
        "config-schema",
        description="Write a JSON schema of recipes. An editor with yaml-language-server then completes and checks a "
        "recipe that begins with `# yaml-language-server: $schema=FILE`.",
    )
    options.add_argument("--json", metavar="FILE", default="-", help="default: standard output")
    file = options.parse_args(args).json
    with check_json("config-schema", file), check_json("config-schema", "-"):  # DeepSpeed prints where it is imported
        schema = _RecipeSchema().generate(_ParserOnly(args=["fit"]).parser)
    del schema["required"]  # a recipe may have several files
    settings = schema["properties"]
    settings["trainer"]["properties"]["callbacks+"] = settings["trainer"]["properties"]["callbacks"]
    settings["trainer"] = {"anyOf": [{"type": "string"}, settings["trainer"]]}  # a file of settings
    write_json(file, schema)
