"""Suggest the right name for a wrong one: by its meaning first, then by its spelling. Imports no torch.

Add a word to the table below if newcomers use it for a name that is spelt differently here.
"""

import difflib
from collections.abc import Iterable

# Names here (classes, or the full places of options; a word with several meanings lists them all), and the words of
# other programs for them. Case, `-` and `_` do not count.
_WORDS_FOR = {
    # The optimizer and its learning rate.
    "model.optimizer.lr": "learning_rate max_lr peak_lr lr base_lr",
    "model.schedule.min_ratio": "min_lr",
    "model.optimizer.betas": "beta1 beta2 adam_beta1 adam_beta2",
    "model.weight_decay": "wd weight_decay decay",
    "model.schedule.warmup_steps": "warmup warmup_iters warmup_steps num_warmup_steps",
    "model.schedule": "scheduler lr_scheduler lr_schedule",
    "model.optimizer": "optim",
    "AdamW": "adamw adamw_fused",
    # Schedules.
    "WarmupStableDecay": "wsd trapezoid trapezoidal",
    "WarmupCosine": "cosine cosine_annealing CosineAnnealingLR cosine_with_warmup",
    "WarmupLinear": "linear LinearLR",
    "WarmupConstant": "constant ConstantLR",
    "WarmupInverseSqrt": "inverse_sqrt noam",
    "CosineRestarts": "CosineAnnealingWarmRestarts",
    # The length of the run and the events in it.
    "trainer.max_steps": "max_iters iters steps train_steps num_steps num_train_steps total_steps",
    "total_tokens": "max_tokens train_tokens num_tokens num_train_tokens token_budget",
    "trainer.max_epochs": "epochs num_epochs num_train_epochs",
    "trainer.gradient_clip_val": "grad_clip clip clip_grad clip_val max_grad_norm gradient_clipping",
    "trainer.accumulate_grad_batches": "grad_accum grad_accum_steps gradient_accumulation gradient_accumulation_steps",
    "trainer.val_check_interval": "eval_interval eval_steps eval_every",
    "trainer.log_every_n_steps": "log_interval logging_steps",
    "seed_everything": "seed",
    "trainer.precision": "dtype",
    "trainer.devices": "gpus num_gpus n_gpus",
    "trainer.num_nodes": "nodes nnodes",
    "trainer.accelerator": "device",
    "ckpt_path": "resume_from resume_from_checkpoint ckpt checkpoint",
    "init_from": "finetune finetune_from pretrained pretrained_checkpoint init_checkpoint load_weights",
    "resume": "auto_resume",
    "every_n_train_steps": "every_n_steps save_every save_interval save_steps",
    "save_top_k": "save_topk",
    "dirpath save_dir trainer.default_root_dir": "output_dir out_dir",
    # The data.
    "data.micro_batch_size": "batch_size device_batch_size per_device_train_batch_size",
    "data.seq_len max_seq_len": "block_size context_length sequence_length",
    "data.num_workers": "workers",
    "data.files": "data_files text path",
    "data.hf_dataset data.files": "dataset",
    # The decoder.
    "d_model": "hidden_size hidden_dim n_embd dim embed_dim",
    "n_layers": "num_layers num_hidden_layers layers depth",
    "n_heads": "heads num_heads nhead num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "d_ff": "intermediate_size",
    "max_seq_len": "max_position_embeddings",
    "rope_theta": "rope_base",
    "tie_embeddings": "tie_word_embeddings",
    "model.activation_checkpointing": "gradient_checkpointing",
    "model.compile_blocks": "compile",
    "GPT2": "gpt",
    # Strategies, precision, loggers.
    "FSDP2Strategy": "fsdp2 FullyShardedDataParallel",
    "DeepSpeedZeROStrategy": "zero zero2 zero3 deepspeed_zero",
    "DDPStrategy": "DistributedDataParallel",
    "Float8": "fp8",
    "BF16Mixed bf16-mixed": "bf16 bfloat16",
    "FP16Mixed 16-mixed": "fp16 float16 half",
    "32-true": "fp32 float32",
    "ResumingTensorBoardLogger": "tensorboard tb",
    "ResumingCSVLogger": "csv",
    "WandbLogger": "wandb",
    "ModelCheckpoint": "checkpoint_callback save_checkpoint",
    "TrainingProgressBar": "progress_bar",
}


def _plain(word: str) -> str:
    return word.lower().replace("_", "").replace("-", "")


SYNONYMS = {_plain(word): names.split() for names, words in _WORDS_FOR.items() for word in words.split()}


def did_you_mean(word: str, names: Iterable[str], places: bool = False) -> str:
    """'; did you mean X?' for the most likely of `names`, or nothing.

    Args:
        word: as the user wrote it; the last part of a dotted word is looked up, too.
        names: the valid names, dotted or not.
        places: whether to name an option elsewhere in the recipe, too, where the word means one.
    """
    known = sorted(set(names))
    head, tail = word.split(".")[0], word.split(".")[-1]
    meanings = [meaning for meaning in SYNONYMS.get(_plain(tail), []) if meaning != word]
    near = (
        next((name for meaning in meanings for name in (meaning, meaning.split(".")[-1]) if name in known), None)
        or _closest(word, known, 0.8)
        or _closest(head, sorted({name.split(".")[0] for name in known} - {head}), 0.8)
        or next((meaning for meaning in meanings if places and "." in meaning), None)
        or _closest(tail, known, 0.6)
    )
    return f"; did you mean {near}?" if near else ""


def _closest(word: str, known: list[str], cutoff: float) -> str | None:
    """The name with the most similar spelling, whatever the case of its letters."""
    by_lower = {name.lower(): name for name in reversed(known)}
    near = difflib.get_close_matches(word.lower(), list(by_lower), 1, cutoff)
    return by_lower[near[0]] if near else None
