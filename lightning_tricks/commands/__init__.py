"""Commands that are not Lightning's.

`branch`, `coordinate-check` and `autopsy` build a recipe's objects: their command lines are in `lightning_tricks/cli`,
and only their computations are here. Each of the others is a function of the arguments after its name.
"""

# Each command, and the file here in which its function lies: imported when the command is given.
COMMANDS = {
    "ls": "recipes",
    "cp": "recipes",
    "consolidate": "consolidate",
    "generate": "generate",
    "ledger": "ledger",
    "verify-resume": "verify_resume",
}
