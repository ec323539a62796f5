"""Load an exported folder with transformers alone, and tell what the model and the tokenizer in it do.

Run as a program of its own, `python load_alone.py FOLDER REQUEST ANSWER`, so that nothing of this collection, and no
object of the process that wrote the folder, takes part.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


@torch.no_grad()
def main(folder: str, request_file: str, answer_file: str) -> None:
    """Answer a request: logits of its `input_ids`, token ids of its `text` if it has one."""
    request = torch.load(request_file, weights_only=True)
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    model, loading = loaded
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    answer = {
        "logits": model.eval()(input_ids=request["input_ids"], use_cache=False).logits.float(),
        "wrong": [f"{kind}: {name}" for kind, names in loading.items() for name in names],
        "tied": embedding.data_ptr() == head.data_ptr(),
        "modules": sorted({name.partition(".")[0] for name in sys.modules}),
    }
    if "text" in request:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        answer["ids"] = tokenizer(request["text"], add_special_tokens=False)["input_ids"]
        answer["decoded"] = tokenizer.decode(answer["ids"])
        answer["eos"] = tokenizer.eos_token_id
    torch.save(answer, Path(answer_file))


if __name__ == "__main__":
    main(*sys.argv[1:])
