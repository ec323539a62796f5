"""datatrove tokenizes rows of text, on this machine or by SLURM on a cluster; TokenData reads its files in place.

`pip install "datatrove[processing]" orjson`, then for the training and for the validation text:

    python examples/datatrove_tokenize.py rows/train --tokenizer tokenizer.json --output tokens/train --tasks 8
    python examples/datatrove_tokenize.py rows/val --tokenizer tokenizer.json --output tokens/val

A task that has ended is recorded in the folder of logs and not run again, so the same command goes on after a kill.
"""

import argparse

from datatrove.executor import LocalPipelineExecutor, SlurmPipelineExecutor
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.tokens import DocumentTokenizer


def main() -> None:
    """Tokenize one folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", help="folder of .jsonl files, each row a document with its text in `text`")
    parser.add_argument("--tokenizer", required=True, help="tokenizer.json, or a name on the Hugging Face Hub")
    parser.add_argument("--end", default="<|endoftext|>", help="the token after each document")
    parser.add_argument("--output", required=True, help="folder of token files, which all hosts see")
    parser.add_argument("--tasks", type=int, default=1, help="at most the number of files, as each is read by one task")
    parser.add_argument("--partition", help="of SLURM; without it, the tasks run on this machine")
    options = parser.parse_args()
    # training rows are drawn by TokenData, and a document's place should not change with the number of tasks
    tokens = DocumentTokenizer(options.output, options.tokenizer, eos_token=options.end, shuffle_documents=False)
    pipeline, logs = [JsonlReader(options.rows, glob_pattern="*.jsonl"), tokens], f"{options.output}_logs"
    if options.partition is None:
        LocalPipelineExecutor(pipeline, tasks=options.tasks, workers=options.tasks, logging_dir=logs).run()
        return
    SlurmPipelineExecutor(
        pipeline, tasks=options.tasks, time="20:00:00", partition=options.partition, job_name="tokens", logging_dir=logs
    ).run()


if __name__ == "__main__":
    main()
