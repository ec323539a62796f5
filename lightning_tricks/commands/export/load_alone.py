"""Load an exported folder with transformers alone, and tell what the model and the tokenizer in it do.

Run as a program of its own, `python load_alone.py FOLDER REQUEST ANSWER`, so that nothing of this collection, and no
object of the process that wrote the folder, takes part. transformers reads a GGUF file with its own reader, which
gives tensors their places and undoes llama.cpp's order of rows. The settings are read here, because the reader drops
some: the width of Qwen3's heads, and GPT-2's positions.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

FILE = "model.gguf"
ACTIVATIONS = {"llama": "silu", "qwen3": "silu", "arcee": "relu2", "apertus": "xielu", "gpt2": "gelu_new"}


@torch.no_grad()
def main(folder: str, request_file: str, answer_file: str) -> None:
    """Answer a request: logits of its `input_ids`, token ids of its `text` if it has one."""
    request = torch.load(request_file, weights_only=True)
    is_gguf = Path(folder, FILE).is_file()
    model, wrong, tied = (_read_gguf if is_gguf else _read_folder)(folder)
    answer = {
        "logits": model.eval()(input_ids=request["input_ids"], use_cache=False).logits.float(),
        "wrong": wrong,
        "tied": tied,
        "modules": sorted({name.partition(".")[0] for name in sys.modules}),
    }
    if "text" in request:
        tokenizer: Any = (
            PreTrainedTokenizerFast.from_pretrained(folder, gguf_file=FILE)
            if is_gguf
            else AutoTokenizer.from_pretrained(folder)
        )
        answer["ids"] = tokenizer(request["text"], add_special_tokens=False)["input_ids"]
        answer["decoded"] = tokenizer.decode(answer["ids"])
        answer["eos"] = tokenizer.eos_token_id
    torch.save(answer, Path(answer_file))


def _read_folder(folder: str) -> tuple[Any, list[str], bool]:
    """The model, a line for each weight that was not found or not used, and whether the head is the embedding."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    model, loading = loaded
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    wrong = [f"{kind}: {name}" for kind, names in loading.items() for name in names]
    return model, wrong, embedding.data_ptr() == head.data_ptr()


def _read_gguf(folder: str) -> tuple[Any, list[str], bool]:
    """The same of a GGUF file."""
    from gguf import GGUFReader
    from transformers import modeling_gguf_pytorch_utils as reader

    file = Path(folder, FILE)
    opened = GGUFReader(file)
    found = {key: field.contents() for key, field in opened.fields.items() if not key.startswith("tokenizer.")}
    names = [tensor.name for tensor in opened.tensors]
    tied = "output.weight" not in names
    architecture = found["general.architecture"]
    # the reader of transformers 5 has neither of these two; one has rows in the order of Llama's
    for name, processor in {"arcee": reader.LlamaTensorProcessor, "apertus": reader.TensorProcessor}.items():
        reader.GGUF_CONFIG_MAPPING[name] = reader.GGUF_CONFIG_MAPPING["llama"]
        reader.TENSOR_PROCESSORS[name] = processor
        reader.GGUF_SUPPORTED_ARCHITECTURES.append(name)
    config = AutoConfig.for_model(architecture, **_settings(found, tied))
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    tensors = reader.load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    if tied:
        model.tie_weights()
        missing = [name for name in missing if name != "lm_head.weight"]
    if architecture == "apertus":
        for number, layer in enumerate(model.model.layers):
            for part in ("alpha_p", "alpha_n", "beta", "eps"):
                getattr(layer.mlp.act_fn, part).data.fill_(found[f"xielu.{part}"][number])
        missing = [name for name in missing if ".act_fn." not in name]
    wrong = [f"missing_keys: {name}" for name in missing] + [f"unexpected_keys: {name}" for name in unexpected]
    if len(names) != len(tensors):
        wrong.append(f"{len(names)} tensors in the file, {len(tensors)} of them in the model")
    return model, wrong, tied


def _settings(found: dict[str, Any], tied: bool) -> dict[str, Any]:
    """The arguments of transformers' configuration class, from the values of a file by their keys."""
    architecture = found["general.architecture"]
    own = {key.removeprefix(f"{architecture}."): value for key, value in found.items()}
    shared = {"vocab_size": own["vocab_size"], "tie_word_embeddings": tied}
    if architecture == "gpt2":
        return shared | {
            "n_positions": own["context_length"],
            "n_embd": own["embedding_length"],
            "n_layer": own["block_count"],
            "n_head": own["attention.head_count"],
            "n_inner": own["feed_forward_length"],
            "layer_norm_epsilon": own["attention.layer_norm_epsilon"],
            "activation_function": ACTIVATIONS[architecture],
        }
    head_dim = {} if architecture == "apertus" else {"head_dim": own["attention.key_length"]}  # it has no such setting
    return (
        shared
        | head_dim
        | {
            "max_position_embeddings": own["context_length"],
            "hidden_size": own["embedding_length"],
            "num_hidden_layers": own["block_count"],
            "num_attention_heads": own["attention.head_count"],
            "num_key_value_heads": own["attention.head_count_kv"],
            "intermediate_size": own["feed_forward_length"],
            "rms_norm_eps": own["attention.layer_norm_rms_epsilon"],
            "rope_parameters": {"rope_type": "default", "rope_theta": own["rope.freq_base"]},
            "hidden_act": ACTIVATIONS[architecture],
        }
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
