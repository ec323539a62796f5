"""`completion`: the script by which a shell completes commands, recipes and files. Imports no torch."""

from lightning_tricks.commands import COMMANDS, CommandParser, recipes_folder

_SCRIPT = """\
[ -n "$ZSH_VERSION" ] && autoload -U +X bashcompinit && bashcompinit
_lightning_tricks() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" found=""
    if [ "$COMP_CWORD" = 1 ]; then
        found="{commands} --help --version"
    elif [ "${{COMP_WORDS[COMP_CWORD-1]}}" = cp ]; then
        found="{recipes}"
    elif [ "${{word#-}}" != "$word" ]; then
        found="--config --help"
    fi
    COMPREPLY=($(compgen -W "$found" -- "$word"))
}}
complete -o default -F _lightning_tricks lightning-tricks
"""


def run(args: list[str]) -> None:
    """Print the script, for bash and for zsh."""
    CommandParser("completion", description="Print the completion for a shell.").parse_args(args)
    recipes = sorted(recipe.stem for recipe in recipes_folder().glob("*.yaml"))
    print(_SCRIPT.format(commands=" ".join(COMMANDS), recipes=" ".join(recipes)), end="")
