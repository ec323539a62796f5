"""A language model from text to a checkpoint in plain Python: no command line, no recipe.

    python examples/train_in_python.py                    # Python's own documentation strings, seconds on a CPU
    python examples/train_in_python.py notes.txt books/   # files and folders of your own
    tensorboard --logdir runs/python

The second start in the same folder goes on from the last checkpoint: raise MAX_STEPS to train further.
"""

import pydoc_data.topics
import sys
from pathlib import Path

import lightning.pytorch as pl
import torch

import lightning_tricks as lt

MAX_STEPS = 200
RUN = Path("runs/python")


def some_text() -> str:
    """A file with half a megabyte of English that every Python has."""
    path = Path("topics.txt")
    path.write_text("\n\n".join(pydoc_data.topics.topics.values()), encoding="utf-8")
    return str(path)


def main() -> None:
    """Train, then let the model write."""
    pl.seed_everything(0)

    # 1. The data: the text becomes token files once, in a cache; a tokenizer is learned from it.
    data = lt.TextData(sys.argv[1:] or some_text(), vocab_size=512, seq_len=64, micro_batch_size=8)

    # 2. The model: vocab_size and max_seq_len of the decoder are those of the data.
    model = lt.LanguageModel(
        lt.Llama(d_model=64, n_layers=2, n_heads=4, qk_norm=True, zero_init_outputs=True),
        optimizer=lambda groups: torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95)),
        schedule=lt.WarmupCosine(warmup_steps=20),
        weight_decay=0.1,
    )

    # 3. The callbacks: LRMonitor, GradNormMonitor and MFUMonitor come with the model.
    saver = lt.SafeCheckpoint(str(RUN / "checkpoints"), every_n_train_steps=100, monitor="val/loss")
    callbacks = [lt.TrainingProgressBar(), lt.StepGuard(), saver]

    # 4. The Trainer is Lightning's own.
    trainer = pl.Trainer(
        max_steps=MAX_STEPS,
        gradient_clip_val=1.0,
        log_every_n_steps=20,
        val_check_interval=100,
        check_val_every_n_epoch=None,  # validation counts steps, not epochs
        limit_val_batches=20,
        accelerator="cpu",
        devices=1,
        enable_model_summary=False,
        logger=lt.ResumingTensorBoardLogger(str(RUN.parent), name=RUN.name, version=""),
        callbacks=callbacks,
    )

    # 5. Start, or go on from the last checkpoint.
    last = RUN / "checkpoints/last.ckpt"
    trainer.fit(model, datamodule=data, ckpt_path=last if last.exists() else None)
    (figures,) = trainer.validate(model, datamodule=data, verbose=False)
    print(f"validation: {figures['val/loss']:.3f} nats a token, {figures['val/bits_per_byte']:.3f} bits/byte")

    # 6. Let it write: a model from its checkpoint alone, as another program would open it.
    trained = lt.LanguageModel.load_from_checkpoint(last)
    prompt = torch.tensor([data.tokenizer.encode("The ").ids])
    sampling = lt.Sampling(temperature=0.8)
    new = [int(token) for token in lt.generate(trained.decoder.eval(), prompt, 32, sampling)]
    print("The " + data.tokenizer.decode(new))
    print(f"For transformers: python -m lightning_tricks export --ckpt_path {last} --output python-hf")


if __name__ == "__main__":
    main()
