"""Suggest the right name for a wrong one: by its meaning first, then by its spelling. Imports no torch.

`SYNONYMS` is the one list of names that other programs use for the settings of this one. Add a row where a newcomer's
word has no likeness with ours.
"""

import difflib
from collections.abc import Iterable

SYNONYMS: dict[str, tuple[str, ...]] = {
    # A word in lower case without `-` and `_`, and what it may mean here: a class, or the full place of an option.
    # The optimizer and its learning rate.
    "learningrate": ("model.optimizer.lr",),
    "maxlr": ("model.optimizer.lr",),
    "peaklr": ("model.optimizer.lr",),
    "lr": ("model.optimizer.lr",),
    "baselr": ("model.optimizer.lr",),
    "minlr": ("model.schedule.min_ratio",),
    "beta1": ("model.optimizer.betas",),
    "beta2": ("model.optimizer.betas",),
    "adambeta1": ("model.optimizer.betas",),
    "adambeta2": ("model.optimizer.betas",),
    "wd": ("model.weight_decay",),
    "weightdecay": ("model.weight_decay",),
    "decay": ("model.weight_decay",),
    "warmup": ("model.schedule.warmup_steps",),
    "warmupiters": ("model.schedule.warmup_steps",),
    "warmupsteps": ("model.schedule.warmup_steps",),
    "numwarmupsteps": ("model.schedule.warmup_steps",),
    "scheduler": ("model.schedule",),
    "lrscheduler": ("model.schedule",),
    "lrschedule": ("model.schedule",),
    "optim": ("model.optimizer",),
    "adamw": ("AdamW",),
    "adamwfused": ("AdamW",),
    # Schedules.
    "wsd": ("WarmupStableDecay",),
    "trapezoid": ("WarmupStableDecay",),
    "trapezoidal": ("WarmupStableDecay",),
    "cosine": ("WarmupCosine",),
    "cosineannealing": ("WarmupCosine",),
    "cosineannealinglr": ("WarmupCosine",),
    "cosinewithwarmup": ("WarmupCosine",),
    "linear": ("WarmupLinear",),
    "linearlr": ("WarmupLinear",),
    "constant": ("WarmupConstant",),
    "constantlr": ("WarmupConstant",),
    "inversesqrt": ("WarmupInverseSqrt",),
    "noam": ("WarmupInverseSqrt",),
    "cosineannealingwarmrestarts": ("CosineRestarts",),
    # The length of the run and what happens in it.
    "maxiters": ("trainer.max_steps",),
    "iters": ("trainer.max_steps",),
    "steps": ("trainer.max_steps",),
    "trainsteps": ("trainer.max_steps",),
    "numsteps": ("trainer.max_steps",),
    "numtrainsteps": ("trainer.max_steps",),
    "totalsteps": ("trainer.max_steps",),
    "epochs": ("trainer.max_epochs",),
    "numepochs": ("trainer.max_epochs",),
    "numtrainepochs": ("trainer.max_epochs",),
    "gradclip": ("trainer.gradient_clip_val",),
    "clip": ("trainer.gradient_clip_val",),
    "clipgrad": ("trainer.gradient_clip_val",),
    "clipval": ("trainer.gradient_clip_val",),
    "maxgradnorm": ("trainer.gradient_clip_val",),
    "gradientclipping": ("trainer.gradient_clip_val",),
    "gradaccum": ("trainer.accumulate_grad_batches",),
    "gradaccumsteps": ("trainer.accumulate_grad_batches",),
    "gradientaccumulation": ("trainer.accumulate_grad_batches",),
    "gradientaccumulationsteps": ("trainer.accumulate_grad_batches",),
    "evalinterval": ("trainer.val_check_interval",),
    "evalsteps": ("trainer.val_check_interval",),
    "evalevery": ("trainer.val_check_interval",),
    "loginterval": ("trainer.log_every_n_steps",),
    "loggingsteps": ("trainer.log_every_n_steps",),
    "seed": ("seed_everything",),
    "dtype": ("trainer.precision",),
    "gpus": ("trainer.devices",),
    "numgpus": ("trainer.devices",),
    "ngpus": ("trainer.devices",),
    "nodes": ("trainer.num_nodes",),
    "nnodes": ("trainer.num_nodes",),
    "device": ("trainer.accelerator",),
    "resume": ("ckpt_path",),
    "resumefrom": ("ckpt_path",),
    "resumefromcheckpoint": ("ckpt_path",),
    "ckpt": ("ckpt_path",),
    "checkpoint": ("ckpt_path",),
    "everynsteps": ("every_n_train_steps",),
    "saveevery": ("every_n_train_steps",),
    "saveinterval": ("every_n_train_steps",),
    "savesteps": ("every_n_train_steps",),
    "savetopk": ("save_top_k",),
    "outputdir": ("dirpath", "save_dir", "trainer.default_root_dir"),
    "outdir": ("dirpath", "save_dir", "trainer.default_root_dir"),
    # The data.
    "batchsize": ("data.micro_batch_size",),
    "devicebatchsize": ("data.micro_batch_size",),
    "perdevicetrainbatchsize": ("data.micro_batch_size",),
    "blocksize": ("data.seq_len", "max_seq_len"),
    "contextlength": ("data.seq_len", "max_seq_len"),
    "sequencelength": ("data.seq_len", "max_seq_len"),
    "workers": ("data.num_workers",),
    "datafiles": ("data.files",),
    "dataset": ("data.hf_dataset", "data.files"),
    "text": ("data.files",),
    "path": ("data.files",),
    # The decoder.
    "hiddensize": ("d_model",),
    "hiddendim": ("d_model",),
    "nembd": ("d_model",),
    "dim": ("d_model",),
    "embeddim": ("d_model",),
    "numlayers": ("n_layers",),
    "numhiddenlayers": ("n_layers",),
    "layers": ("n_layers",),
    "depth": ("n_layers",),
    "heads": ("n_heads",),
    "numheads": ("n_heads",),
    "nhead": ("n_heads",),
    "numattentionheads": ("n_heads",),
    "numkeyvalueheads": ("n_kv_heads",),
    "intermediatesize": ("d_ff",),
    "maxpositionembeddings": ("max_seq_len",),
    "ropebase": ("rope_theta",),
    "tiewordembeddings": ("tie_embeddings",),
    "gradientcheckpointing": ("model.activation_checkpointing",),
    "compile": ("model.compile_blocks",),
    "gpt": ("GPT2",),
    # Strategies, precision, loggers.
    "fsdp2": ("FSDP2Strategy",),
    "fullyshardeddataparallel": ("FSDP2Strategy",),
    "zero": ("DeepSpeedZeROStrategy",),
    "zero2": ("DeepSpeedZeROStrategy",),
    "zero3": ("DeepSpeedZeROStrategy",),
    "deepspeedzero": ("DeepSpeedZeROStrategy",),
    "distributeddataparallel": ("DDPStrategy",),
    "fp8": ("Float8",),
    "bf16": ("BF16Mixed", "bf16-mixed"),
    "bfloat16": ("BF16Mixed", "bf16-mixed"),
    "fp16": ("FP16Mixed", "16-mixed"),
    "float16": ("FP16Mixed", "16-mixed"),
    "half": ("FP16Mixed", "16-mixed"),
    "fp32": ("32-true",),
    "float32": ("32-true",),
    "tensorboard": ("ResumingTensorBoardLogger",),
    "tb": ("ResumingTensorBoardLogger",),
    "csv": ("ResumingCSVLogger",),
    "wandb": ("WandbLogger",),
    "checkpointcallback": ("ModelCheckpoint",),
    "savecheckpoint": ("ModelCheckpoint",),
    "progressbar": ("TrainingProgressBar",),
    # Commands.
    "train": ("fit",),
    "pretrain": ("fit",),
    "run": ("fit",),
    "eval": ("validate",),
    "evaluate": ("validate",),
    "val": ("validate",),
    "infer": ("predict",),
    "tokenize": ("prepare",),
    "list": ("ls",),
    "copy": ("cp",),
    "export": ("consolidate",),
}


def did_you_mean(word: str, names: Iterable[str], places: bool = False) -> str:
    """'; did you mean X?' for the most likely of `names`, or nothing.

    Args:
        word: as the user wrote it; of a dotted word the last part is looked up, too.
        names: what would be right, dotted or not.
        places: whether a place elsewhere in the recipe may be named, too, where the word means an option of it.
    """
    known = sorted(set(names))
    head, tail = word.split(".")[0], word.split(".")[-1]
    meanings = [meaning for meaning in SYNONYMS.get(_plain(tail), ()) if meaning != word]
    near = (
        next((name for meaning in meanings for name in (meaning, meaning.split(".")[-1]) if name in known), None)
        or _closest(word, known, 0.8)
        or _closest(head, sorted({name.split(".")[0] for name in known} - {head}), 0.8)
        or next((meaning for meaning in meanings if places and "." in meaning), None)
        or _closest(tail, known, 0.6)
    )
    return f"; did you mean {near}?" if near else ""


def _plain(word: str) -> str:
    return word.lower().replace("_", "").replace("-", "")


def _closest(word: str, known: list[str], cutoff: float) -> str | None:
    """The name that is spelt most alike; the case of letters is ignored."""
    by_lower = {name.lower(): name for name in reversed(known)}
    near = difflib.get_close_matches(word.lower(), list(by_lower), 1, cutoff)
    return by_lower[near[0]] if near else None
