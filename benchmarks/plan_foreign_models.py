"""Modules that the collection does not own, as their users write them, for `python -m benchmarks.plan_foreign`.

Models of transformers, diffusers and torch's own layers at small width, with random data, trained by AdamW or SGD.
"""

import contextlib
import itertools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_tricks._trainer.lightning import pl

VOCABULARY, ROWS, LENGTH = 512, 4, 128
SHAPE = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
Batch = dict[str, Tensor]


class Trained(pl.LightningModule):
    """A model, the batch on which it is trained again and again, and its loss.

    Args:
        model: the model.
        batch: of every step.
        loss_of: maps model and batch to the loss; None: the model returns it as `loss`, as those of transformers do.
        optimizer: makes the optimizer from parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Batch,
        loss_of: Callable[[nn.Module, Batch], Tensor] | None = None,
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    ) -> None:
        super().__init__()
        self.model, self.batch, self.loss_of, self.optimizer = model, batch, loss_of, optimizer

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.model(**batch).loss if self.loss_of is None else self.loss_of(self.model, batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer(self.parameters(), lr=1e-3)

    def train_dataloader(self) -> Any:
        batches: Any = [self.batch] * 4
        return DataLoader(batches, batch_size=None)


class ReadsItsLoss(Trained):
    """The same whose step reads a value, as many do to print it."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if loss.item() > 100:
            raise ValueError("the loss is too large")
        return loss


class GAN(pl.LightningModule):
    """Two networks, two optimizers, manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(64, 512), nn.LeakyReLU(0.2), nn.Linear(512, 784), nn.Tanh())
        self.discriminator = nn.Sequential(nn.Linear(784, 512), nn.LeakyReLU(0.2), nn.Linear(512, 1))

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        of_generator, of_discriminator = cast(list[Any], self.optimizers())
        fake = self.generator(batch["noise"])
        of_discriminator.zero_grad()
        self.manual_backward(F.softplus(self.discriminator(fake.detach()) - self.discriminator(batch["image"])).mean())
        of_discriminator.step()
        of_generator.zero_grad()
        self.manual_backward(F.softplus(-self.discriminator(fake)).mean())
        of_generator.step()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.Adam(part.parameters(), lr=1e-3) for part in (self.generator, self.discriminator)]

    def train_dataloader(self) -> Any:
        batches: Any = [{"image": torch.rand(64, 784), "noise": torch.randn(64, 64)}] * 4
        return DataLoader(batches, batch_size=None)


def _ids(*shape: int) -> Tensor:
    return torch.randint(3, VOCABULARY, shape or (ROWS, LENGTH))


def _text() -> Batch:
    return {"input_ids": (ids := _ids()), "labels": ids.clone()}


def _of(kind: str, task: str, batch: Batch, /, **config: Any) -> Trained:
    import transformers

    settings = getattr(transformers, f"{kind}Config")(**config)
    return Trained(getattr(transformers, f"{kind}{task}")(settings), batch)


def llama() -> Trained:
    sizes = {**SHAPE, "num_key_value_heads": 2, "intermediate_size": 384, "vocab_size": VOCABULARY}
    return _of("Llama", "ForCausalLM", _text(), **sizes, use_cache=False)


def gpt2() -> Trained:
    return _of(
        "GPT2", "LMHeadModel", _text(), vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=128, n_layer=4, n_head=4
    )


def bert() -> Trained:
    batch = {**_text(), "attention_mask": torch.ones(ROWS, LENGTH, dtype=torch.long)}
    return _of("Bert", "ForMaskedLM", batch, **SHAPE, intermediate_size=512, vocab_size=VOCABULARY)


def t5() -> Trained:
    sizes = {"d_model": 128, "d_kv": 32, "d_ff": 512, "num_layers": 3, "num_heads": 4}
    return _of(
        "T5",
        "ForConditionalGeneration",
        _text(),
        **sizes,
        vocab_size=VOCABULARY,
        decoder_start_token_id=0,
        use_cache=False,
    )


def mixtral() -> Trained:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2, "intermediate_size": 256}
    return _of("Mixtral", "ForCausalLM", _text(), **SHAPE, **experts, vocab_size=VOCABULARY, use_cache=False)


def mamba() -> Trained:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": VOCABULARY, "state_size": 8}
    return _of("Mamba", "ForCausalLM", {"input_ids": (ids := _ids(2, 64)), "labels": ids.clone()}, **sizes)


def vit() -> Trained:
    batch = {"pixel_values": torch.randn(16, 3, 64, 64), "labels": torch.randint(10, (16,))}
    return _of(
        "ViT",
        "ForImageClassification",
        batch,
        **SHAPE,
        intermediate_size=512,
        image_size=64,
        patch_size=8,
        num_labels=10,
    )


def wav2vec2() -> Trained:
    heads = {"conv_dim": (64,) * 7, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4}
    batch = {"input_values": torch.randn(ROWS, 8000), "labels": torch.randint(10, (ROWS,))}
    sizes = {**SHAPE, **heads, "intermediate_size": 512, "apply_spec_augment": False, "layerdrop": 0.0}
    return _of("Wav2Vec2", "ForSequenceClassification", batch, **sizes, num_labels=10, classifier_proj_size=64)


def clip() -> Trained:
    sizes = {**SHAPE, "intermediate_size": 512}
    text = {**sizes, "vocab_size": VOCABULARY, "max_position_embeddings": 32, "eos_token_id": 2}
    image = {**sizes, "image_size": 64, "patch_size": 8}
    batch = {"input_ids": _ids(16, 32), "pixel_values": torch.randn(16, 3, 64, 64)}
    module = _of("CLIP", "Model", batch, text_config=text, vision_config=image, projection_dim=64)
    module.loss_of = lambda model, batch: model(**batch, return_loss=True).loss
    return module


def unet_of_diffusers() -> Trained:
    import diffusers

    model = diffusers.UNet2DModel(
        sample_size=32, in_channels=3, out_channels=3, block_out_channels=(32, 64), layers_per_block=1,
        norm_num_groups=8, down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    noisy = torch.randn(8, 3, 32, 32)
    batch = {"noisy": noisy, "noise": torch.randn_like(noisy), "timesteps": torch.randint(1000, (8,))}
    return Trained(model, batch, lambda net, b: F.mse_loss(net(b["noisy"], b["timesteps"]).sample, b["noise"]))


class Translator(nn.Module):
    """torch's own encoder and decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, 128), nn.Linear(128, VOCABULARY)
        self.body = nn.Transformer(128, 4, 3, 3, 512, batch_first=True)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        return self.head(self.body(self.embed(source), self.embed(target), tgt_mask=mask, tgt_is_causal=True))


def _next_token(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(batch["input_ids"], batch["labels"]) if isinstance(model, Translator) else model(batch["input_ids"])
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def translator() -> Trained:
    return Trained(Translator(), _text(), _next_token)


class Recurrent(nn.Module):
    """A language model of two LSTM layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, 128), nn.Linear(256, VOCABULARY)
        self.lstm = nn.LSTM(128, 256, num_layers=2, batch_first=True, dropout=0.1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(ids))[0])


def lstm() -> Trained:
    return Trained(Recurrent(), _text(), _next_token)


class Residual(nn.Module):
    """Two convolutions with batch norm, and what goes around them."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, after, 3, 2, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU(inplace=True),
            nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after),
        )  # fmt: skip
        self.around = nn.Conv2d(before, after, 1, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.around(x))


def resnet() -> Trained:
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), Residual(32, 64), Residual(64, 128), Residual(128, 256),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10),
    )  # fmt: skip
    batch = {"images": torch.randn(16, 3, 32, 32), "classes": torch.randint(10, (16,))}

    def momentum(parameters: Any, lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=lr, momentum=0.9)

    return Trained(model, batch, lambda net, b: F.cross_entropy(net(b["images"]), b["classes"]), momentum)


class UNet(nn.Module):
    """Three scales of convolutions with group norm, joined across."""

    def __init__(self) -> None:
        super().__init__()
        widths = (16, 32, 64)
        self.first = nn.Conv2d(3, widths[0], 3, padding=1)
        self.down = nn.ModuleList(self._part(a, b) for a, b in itertools.pairwise(widths))
        self.up = nn.ModuleList(self._part(b + a, a) for a, b in itertools.pairwise(widths))
        self.last = nn.Conv2d(widths[0], 3, 1)

    @staticmethod
    def _part(before: int, after: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(8, after), nn.SiLU())

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        kept = []
        for part in self.down:
            kept.append(x)
            x = part(F.max_pool2d(x, 2))
        for part in reversed(self.up):
            x = part(torch.cat([F.interpolate(x, scale_factor=2.0), kept.pop()], 1))
        return self.last(x)


def unet() -> Trained:
    batch = {"noisy": torch.randn(8, 3, 32, 32), "noise": torch.randn(8, 3, 32, 32)}
    return Trained(UNet(), batch, lambda net, b: F.mse_loss(net(b["noisy"]), b["noise"]))


class Recommender(nn.Module):
    """Bags of items and a multi-layer perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.EmbeddingBag(50_000, 64, mode="mean")
        self.body = nn.Sequential(nn.Linear(64 + 13, 256), nn.ReLU(), nn.Linear(256, 1))

    def forward(self, bags: Tensor, dense: Tensor) -> Tensor:
        return self.body(torch.cat([self.items(bags), dense], 1)).squeeze(1)


def recommender() -> Trained:
    batch = {"bags": torch.randint(50_000, (1024, 20)), "dense": torch.rand(1024, 13), "clicked": torch.rand(1024)}

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return F.binary_cross_entropy_with_logits(model(batch["bags"], batch["dense"]), batch["clicked"])

    return Trained(Recommender(), batch, loss)


def reads_its_loss() -> Trained:
    module = lstm()
    return ReadsItsLoss(module.model, module.batch, module.loss_of)


MODELS: dict[str, Callable[[], Any]] = {
    "transformers Llama": llama,
    "transformers GPT-2": gpt2,
    "transformers BERT": bert,
    "transformers T5": t5,
    "transformers Mixtral": mixtral,
    "transformers Mamba": mamba,
    "transformers ViT": vit,
    "transformers Wav2Vec2": wav2vec2,
    "transformers CLIP": clip,
    "diffusers UNet2D": unet_of_diffusers,
    "torch Transformer": translator,
    "torch LSTM": lstm,
    "torch residual network": resnet,
    "torch U-Net": unet,
    "torch recommender": recommender,
    "GAN, manual optimization": GAN,
    "an LSTM that reads its loss": reads_its_loss,
}
LINES = ("GAN, manual optimization", "an LSTM that reads its loss")  # whose memory is not known without data


def installed(name: str) -> bool:
    """Whether the package of a model is there."""
    package = name.split()[0]
    if package not in ("transformers", "diffusers"):
        return True
    with contextlib.suppress(ImportError):
        __import__(package)
        return True
    return False
