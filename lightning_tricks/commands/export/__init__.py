"""`export`: a folder that transformers or llama.cpp loads, out of a checkpoint. Needs no recipe, no data and no GPU.

From the first to the last: `folder_files` or `gguf_file`, `model_card`, `verify_export`,
`load_alone`, `export`.
"""

from pathlib import Path

from lightning_tricks.commands import CommandParser
from lightning_tricks.commands.answers import add_json, check_json, write_json


def run(args: list[str]) -> None:
    """Write the folder of a checkpoint."""
    parser = CommandParser(
        "export",
        description="Write the model of a checkpoint as transformers saves one: config.json, safetensors, tokenizer, "
        "generation_config.json and a model card. Weights are read and written one after the other. A fresh process "
        "then loads the folder with transformers alone, and its logits and token ids are compared before the folder "
        "gets its name. With --format gguf the folder has one file for llama.cpp, compared in the same way.",
    )
    parser.add_argument(
        "--ckpt_path", required=True, help="a file, or a folder of shards; last: the newest below this folder"
    )
    parser.add_argument("--output", required=True, help="the folder to write, which must not exist")
    parser.add_argument("--format", choices=["hf", "gguf"], default="hf", help="default %(default)s")
    parser.add_argument("--average", help="export this average in place of the weights: ema, tail_average")
    parser.add_argument(
        "--dtype", choices=["fp32", "bf16", "fp16"], help="default: as each weight is saved, so that nothing is lost"
    )
    add_json(parser)
    options = parser.parse_args(args)

    from lightning_tricks.commands.export.export import export

    with check_json("export", options.json):
        record = export(options.ckpt_path, Path(options.output), options.format, options.average, options.dtype)
    write_json(options.json, record)
