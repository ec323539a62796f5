"""Commands that are not Lightning's; each is a function of the arguments after its name."""

# Each command, and the file here in which its function lies: imported when the command is given.
COMMANDS = {
    "ls": "recipes",
    "cp": "recipes",
    "consolidate": "consolidate",
    "generate": "generate",
    "ledger": "ledger",
    "verify-resume": "verify_resume_command",
}
