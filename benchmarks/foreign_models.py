"""Models that the collection does not own, each in a plain LightningModule, for `python -m benchmarks.foreign`.

All come from packages of the registry, at toy width with weights of their own library's choice.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_tricks._trainer.lightning import pl
from lightning_tricks.optim import decay_groups

ROWS = 4  # in a batch of the whole run; each of two processes takes half
LENGTH = 16
VOCABULARY = 64
SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": VOCABULARY}
Batch = dict[str, Tensor]


class Foreign(pl.LightningModule):
    """Any model whose loss a function gives, trained by SGD with decay groups.

    Args:
        model: the model.
        loss_of: maps model and batch to a loss that is a mean over rows.
        batch_of: makes a batch of `ROWS` rows from a source of randomness.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_of: Callable[[nn.Module, Batch], Tensor],
        batch_of: Callable[[torch.Generator], Batch],
    ) -> None:
        super().__init__()
        self.model, self.loss_of, self.batch_of = model, loss_of, batch_of
        self.losses: list[float] = []

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.loss_of(self.model, batch)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(decay_groups(self, weight_decay=0.1), lr=0.05)


class GAN(pl.LightningModule):
    """Lightning's example: two networks, two optimizers, `toggle_optimizer`, manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(8, 32), nn.LeakyReLU(0.2), nn.Linear(32, 16), nn.Tanh())
        self.discriminator = nn.Sequential(nn.Linear(16, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
        self.losses: list[float] = []

    def forward(self, z: Tensor) -> Tensor:
        return self.generator(z)

    def batch_of(self, generator: torch.Generator) -> Batch:
        return {"image": torch.rand(ROWS, 16, generator=generator), "z": torch.randn(ROWS, 8, generator=generator)}

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        judge, bce = self.discriminator, nn.functional.binary_cross_entropy_with_logits
        g, d = cast(list[Any], self.optimizers())
        true, false = torch.ones(len(batch["z"]), 1), torch.zeros(len(batch["z"]), 1)
        self.toggle_optimizer(g)
        loss = bce(judge(self(batch["z"])), true)
        g.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(g, gradient_clip_val=0.5)
        g.step()
        self.untoggle_optimizer(g)
        self.toggle_optimizer(d)
        real, fake = bce(judge(batch["image"]), true), bce(judge(self(batch["z"]).detach()), false)
        d.zero_grad()
        self.manual_backward((real + fake) / 2)
        self.clip_gradients(d, gradient_clip_val=0.5)
        d.step()
        self.untoggle_optimizer(d)
        self.losses += [loss.item(), ((real + fake) / 2).item()]

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [
            torch.optim.SGD(decay_groups(part, weight_decay=0.1), lr=0.05)
            for part in (self.generator, self.discriminator)
        ]


def _ids(generator: torch.Generator) -> Tensor:
    return torch.randint(1, VOCABULARY, (ROWS, LENGTH), generator=generator)


def _labelled(generator: torch.Generator) -> Batch:
    ids = _ids(generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def _pictures(generator: torch.Generator) -> Batch:
    return {
        "pixel_values": torch.randn(ROWS, 3, 16, 16, generator=generator),
        "labels": torch.randint(4, (ROWS,), generator=generator),
    }


def _own_loss(model: nn.Module, batch: Batch) -> Tensor:
    return model(**batch).loss


def _transformers(
    kind: str, task: str, batch_of: Callable[[torch.Generator], Batch] = _labelled, /, **config: Any
) -> Any:
    import transformers

    settings = getattr(transformers, f"{kind}Config")(**config)
    return Foreign(getattr(transformers, f"{kind}{task}")(settings), _own_loss, batch_of)


def llama(**more: Any) -> Any:
    return _transformers(
        "Llama", "ForCausalLM", **SHAPE, intermediate_size=64, num_key_value_heads=2, max_position_embeddings=64, **more
    )


def gpt2() -> Any:
    quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return _transformers(
        "GPT2", "LMHeadModel", vocab_size=VOCABULARY, n_positions=64, n_embd=32, n_layer=2, n_head=4, **quiet
    )


def mixtral(**more: Any) -> Any:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2}
    return _transformers("Mixtral", "ForCausalLM", **SHAPE, **experts, intermediate_size=64, **more)


def qwen3_moe(**more: Any) -> Any:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_key_value_heads": 2}
    return _transformers("Qwen3Moe", "ForCausalLM", **SHAPE, **experts, intermediate_size=64, head_dim=8, **more)


def t5() -> Any:
    shape = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
    return _transformers("T5", "ForConditionalGeneration", **shape, vocab_size=VOCABULARY, decoder_start_token_id=0)


def bert() -> Any:
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return _transformers("Bert", "ForMaskedLM", **SHAPE, intermediate_size=64, max_position_embeddings=64, **quiet)


def whisper() -> Any:
    def batch_of(generator: torch.Generator) -> Batch:
        return {"input_features": torch.randn(ROWS, 16, 64, generator=generator), "labels": _ids(generator)}

    layers = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    width = {"d_model": 32, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "num_mel_bins": 16}
    places = {"max_source_positions": 32, "max_target_positions": 32, "vocab_size": VOCABULARY}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3}
    return _transformers("Whisper", "ForConditionalGeneration", batch_of, **layers, **width, **places, **tokens)


def mamba() -> Any:
    def batch_of(generator: torch.Generator) -> Batch:
        ids = _ids(generator)
        return {"input_ids": ids, "labels": ids}

    shape = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": VOCABULARY, "state_size": 8}
    return _transformers("Mamba", "ForCausalLM", batch_of, **shape)


def vit() -> Any:
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_labels": 4}
    shape = {name: value for name, value in SHAPE.items() if name != "vocab_size"}
    return _transformers(
        "ViT", "ForImageClassification", _pictures, **shape, intermediate_size=64, image_size=16, patch_size=4, **quiet
    )


def timm_vit() -> Any:
    import timm

    model = timm.models.vision_transformer.VisionTransformer(
        img_size=16, patch_size=4, embed_dim=32, depth=2, num_heads=4, num_classes=4, reg_tokens=2
    )

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        return nn.functional.cross_entropy(model(batch["pixel_values"]), batch["labels"])

    return Foreign(model, loss_of, _pictures)


def unet() -> Any:
    import diffusers

    model = diffusers.UNet2DModel(
        sample_size=16, in_channels=3, out_channels=3, block_out_channels=(16, 32), layers_per_block=1,
        norm_num_groups=4, down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip

    def batch_of(generator: torch.Generator) -> Batch:
        pictures = torch.randn(2, ROWS, 3, 16, 16, generator=generator)
        times = torch.randint(1000, (ROWS,), generator=generator)
        return {"noisy": pictures[0], "noise": pictures[1], "timesteps": times}

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        return nn.functional.mse_loss(model(batch["noisy"], batch["timesteps"]).sample, batch["noise"])

    return Foreign(model, loss_of, batch_of)


def lora() -> Any:
    import peft

    module = llama()
    module.model = peft.get_peft_model(module.model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    return module


class LSTM(nn.Module):
    """A language model of two recurrent layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, 32), nn.Linear(32, VOCABULARY)
        self.lstm = nn.LSTM(32, 32, num_layers=2, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(ids))[0])


def lstm() -> Any:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        return nn.functional.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())

    return Foreign(LSTM(), loss_of, _labelled)


MODELS: dict[str, Callable[..., Any]] = {
    "transformers GPT-2": gpt2,
    "transformers Llama": llama,
    "transformers Mixtral": mixtral,
    "transformers Qwen3-MoE": qwen3_moe,
    "transformers T5": t5,
    "transformers BERT": bert,
    "transformers Whisper": whisper,
    "transformers Mamba": mamba,
    "transformers ViT": vit,
    "timm ViT": timm_vit,
    "diffusers UNet2D": unet,
    "PEFT LoRA on Llama": lora,
    "LSTM": lstm,
    "Lightning's GAN": GAN,
}
