"""The arms of the race: recipes of recipes/race, and tricks as options of `fit` on top of them."""

from collections.abc import Mapping
from typing import Any, NamedTuple

REFERENCE = "adamw"  # whose steps are the unit of processor time


class Arm(NamedTuple):
    """One way to train.

    Args:
        recipe: of recipes/race.
        what: the trick, in words.
        base: arm that it is compared with; None for the reference and for stock Lightning.
        options: of `fit`, on top of the recipe.
        without: the base has the trick, and this arm has not.
        same_cost: a step takes as long as one of its base, by its construction.
        share: of the steps that it would have in the time of its base.
    """

    recipe: str
    what: str
    base: str | None = None
    options: Mapping[str, Any] = {}
    without: bool = False
    same_cost: bool = True
    share: float = 1.0


def of_adamw(what: str, options: Mapping[str, Any], **facts: Any) -> Arm:
    """AdamW's recipe with one more option."""
    return Arm("adamw", what, "adamw", options, **facts)


def of_muon(what: str, options: Mapping[str, Any], **facts: Any) -> Arm:
    """Muon's recipe with one more option."""
    return Arm("muon", what, "muon", options, **facts)


def rules(embed: str = "lr_scale: 4.0", head: str = "lr_scale: 1.5", other: str = "") -> str:
    """`param_rules` of the recipes, with other settings for the embedding and the head, and more rules."""
    return f"[{{pattern: embed, {embed}}}, {{pattern: head, {head}}}{other}]"


FINALS = {
    "stock": Arm("stock", "GPT-2 in plain torch, AdamW, Lightning's defaults", same_cost=False),
    "adamw": Arm("adamw", "AdamW, tuned: the small.yaml of 2026-11 in small"),
    "muon": Arm("muon", "Muon for matrices and AdamW for the rest, tuned", "adamw", same_cost=False),
    "stack": of_muon(
        "Muon with Polar Express, blocks compiled",
        {"model.optimizer.coefficients": "polar_express", "model.compile_blocks": "true"},
        same_cost=False,
    ),
}

SCREENED = {
    "decay_groups": of_adamw(
        "norms do not decay", {"model.param_rules": rules(other=", {role: norm, weight_decay: 0.1}")}, without=True
    ),
    "warmup": of_adamw("warmup of 4 % of the steps", {"model.schedule.warmup_steps": 0}, without=True),
    "cosine": of_adamw("cosine to 10 %, for linear to 0", {"model.schedule": "WarmupCosine"}),
    "linear_to_10": of_adamw("linear to 10 %, for linear to 0", {"model.schedule.min_ratio": 0.1}),
    "wsd": of_adamw(
        "constant, then 1-sqrt over the last fifth, for linear to 0",
        {"model.schedule": "WarmupStableDecay", "model.schedule.decay_fraction": 0.2},
    ),
    "power_decay": of_adamw("(steps left)^1.2 over the last 80 %, for linear to 0", {"model.schedule": "PowerDecay"}),
    "lr_by_role": of_adamw("lr x 4 of the embedding, x 1.5 of the head", {"model.param_rules": "[]"}, without=True),
    "muon": FINALS["muon"],
    "qk_norm": of_adamw("QK-norm", {"model.decoder.qk_norm": "false"}, without=True, same_cost=False),
    "relu2": of_adamw("ReLU squared, for GELU", {"model.decoder.activation": "gelu"}, without=True, same_cost=False),
    "zero_init": of_adamw("outputs of blocks begin at 0", {"model.decoder.zero_init_outputs": "false"}, without=True),
    "embed_beta2": of_adamw(
        "beta2 0.99 of the embedding, for 0.95", {"model.param_rules": rules("lr_scale: 4.0, betas: [0.9, 0.99]")}
    ),
    "cautious_adamw": of_adamw(
        "cautious decay of AdamW",
        {"model.optimizer": "{class_path: AdamWCautiousDecay, init_args: {lr: 2.0e-3, betas: [0.9, 0.95]}}"},
        same_cost=False,
    ),
    "softcap_15": of_adamw("logits capped at 15", {"model.decoder.logit_softcap": 15}, same_cost=False),
    "softcap_30": of_adamw("logits capped at 30", {"model.decoder.logit_softcap": 30}, same_cost=False),
    "z_loss": of_adamw("z-loss 1e-4", {"model.z_loss": 1e-4}),
    "blend": of_adamw(
        "0.6 of an EMA over 150 steps at the end",
        {"trainer.callbacks+": "{class_path: EMA, init_args: {decay: 0.9933, blend: 0.6}}"},
        same_cost=False,
    ),
    "batch_warmup": of_adamw(
        "half the batch for the first fifth",
        {
            "data.micro_batch_size": 4,
            "trainer.accumulate_grad_batches": 2,
            "trainer.val_check_interval": "STEPS*9/10",  # half of the micro-batches
            "trainer.callbacks+": "{class_path: BatchSizeWarmup, init_args: {stages: {0: 1, STEPS/5: 2}}}",
        },
        share=1.1,
    ),
    "document_shuffle": of_adamw("documents in a new order each epoch, then rows", {"data.shuffle": "documents"}),
    "polar_express": of_muon("coefficients of Polar Express", {"model.optimizer.coefficients": "polar_express"}),
    "normuon": of_muon("NorMuon's normalisation", {"model.optimizer.normuon_beta2": 0.95}, same_cost=False),
    "cautious_muon": of_muon("cautious decay", {"model.optimizer.cautious_weight_decay": "true"}, same_cost=False),
    "document_mask": of_adamw("attention within documents", {"data.document_ids": "true"}, same_cost=False),
    "best_fit": of_adamw(
        "best-fit packing, within documents",
        {"data.document_ids": "true", "data.packing": "best_fit"},
        same_cost=False,
    ),
    "experts": of_adamw(
        "8 experts, 2 a token, at equal FLOPs",
        {"model.decoder.activation": "swiglu", **{f"model.decoder.{name}": value for name, value in {
            "n_experts": 8, "experts_per_token": 2, "d_expert": 168, "sequence_balance_weight": 1e-4}.items()}},
        same_cost=False,
    ),
    "clip": of_adamw("clip at norm 1", {"trainer.gradient_clip_val": "null"}, without=True),
    "compiled": of_adamw("blocks compiled", {"model.compile_blocks": "true"}, same_cost=False),
    "longer_rows": of_adamw(
        "rows of 512 tokens, half as many", {"data.seq_len": 512, "data.micro_batch_size": 4}, same_cost=False
    ),
    "half_batch": of_adamw("half the batch", {"data.micro_batch_size": 4}, same_cost=False),
    "double_batch": of_adamw("twice the batch", {"data.micro_batch_size": 16}, same_cost=False),
    "muon_double_batch": of_muon("twice the batch", {"data.micro_batch_size": 16}, same_cost=False),
    "muon_decay_0.02": of_muon("weight decay 0.02, for 0.1", {"model.weight_decay": 0.02}),
    "muon_beta2_0.99": of_muon("beta2 0.99 of AdamW's part, for 0.95", {"model.optimizer.betas": "[0.9, 0.99]"}),
    "muon_beta2_0.9": of_muon("beta2 0.9 of AdamW's part, for 0.95", {"model.optimizer.betas": "[0.9, 0.9]"}),
    "muon_clip": of_muon("clip at norm 1", {"trainer.gradient_clip_val": "null"}, without=True),
}  # fmt: skip

TUNED = {
    **{f"stock_lr_{lr:g}": Arm("stock", f"lr {lr:g}", "stock", {"model.lr": lr}) for lr in (5e-4, 1e-3, 2e-3, 4e-3)},
    **{f"adamw_lr_{lr:g}": of_adamw(f"lr {lr:g}", {"model.optimizer.lr": lr}) for lr in (1e-3, 2e-3, 4e-3, 8e-3)},
    **{
        f"adamw_embed_x{scale}": of_adamw(
            f"lr of the embedding x {scale}", {"model.param_rules": rules(f"lr_scale: {scale}")}
        )
        for scale in (8, 16)
    },
    **{
        f"muon_lr_{lr:g}_{adamw:g}": of_muon(
            f"lr {lr:g} of Muon, {adamw:g} of AdamW", {"model.optimizer.muon_lr": lr, "model.optimizer.lr": adamw}
        )
        for lr, adamw in (
            (0.005, 4e-3),
            (0.01, 2e-3),
            (0.01, 4e-3),
            (0.01, 8e-3),
            (0.01, 1.6e-2),
            (0.02, 4e-3),
            (0.02, 8e-3),
            (0.04, 4e-3),
        )
    },
}

DEPTHS = {  # at equal steps, half of those of the screening
    f"{name}_{layers}_layers": Arm(
        name, f"{layers} layers, {name}", base=f"adamw_{layers}_layers" if name == "muon" else None,
        options={"model.decoder.n_layers": layers}, share=0.5,
    )
    for layers in (2, 8) for name in ("adamw", "muon")
}  # fmt: skip

ARMS = {**FINALS, **SCREENED, **TUNED, **DEPTHS}
