"""`consolidate`: make one file, which a plain Trainer opens, of a folder of shards. Needs no recipe and no GPU."""

from pathlib import Path

from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.quote import say
from lightning_tricks._host.writable import check_file
from lightning_tricks.checkpoints import check_checkpoint, open_checkpoint, size_of_folder
from lightning_tricks.checkpoints.bucket import local_copy
from lightning_tricks.checkpoints.check_checkpoint import is_of_deepspeed
from lightning_tricks.checkpoints.write_file import write_file
from lightning_tricks.commands import CommandParser
from lightning_tricks.logs.table import size_text
from lightning_tricks.strategies.consolidate_deepspeed import consolidate_deepspeed


def run(args: list[str]) -> None:
    """Write FILE from FOLDER."""
    parser = CommandParser(
        "consolidate",
        description="Make one checkpoint file of a folder of shards. Needs as much of the host's memory, and of the "
        "disk, as all weights and optimizer state take. Objects that could run a program are refused, unless "
        "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1 is set. A folder of DeepSpeed gives its weights alone, and whatever is "
        "pickled in it runs: open it only if you trust it.",
    )
    parser.add_argument("folder", help="a folder of shards, of FSDP2Strategy, DeepSpeed or ModelParallelStrategy")
    parser.add_argument("file", help="the file to write")
    parser.add_argument("--overwrite", action="store_true", help="replace FILE if it exists")
    options = parser.parse_args(args)
    file = Path(options.file)
    check_file("consolidate: file", file)
    if file.exists() and not options.overwrite:
        raise UsageError(f"{file} exists: name another file, or give --overwrite")
    folder = local_copy(options.folder)
    if is_of_deepspeed(folder):
        consolidate_deepspeed(folder, file)
        return
    if not check_checkpoint(folder).is_dir():
        raise UsageError(f"{options.folder} is one file already")
    say(f"{folder}: {size_text(size_of_folder(folder))}, read to memory")
    checkpoint = open_checkpoint(folder)
    write_file(checkpoint, file)
    step, optimizers = checkpoint.get("global_step", "?"), len(checkpoint.get("optimizer_states", []))
    tensors = f"{len(checkpoint['state_dict']):,} tensors of the module"
    say(f"{file}: step {step}, {tensors}, {optimizers} optimizer{'s' * (optimizers != 1)}")
    try:
        open_checkpoint(file, weights_only=True, verify=False)
    except UsageError as error:
        say(f"note: {error}")
