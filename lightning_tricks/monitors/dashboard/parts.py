"""The parts of `TensorBoardDashboard`: the layout of the charts, a link to them, and the table of settings."""

import html
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import quote

import yaml

from lightning_tricks._lightning import BACKEND, pl
from lightning_tricks._tensors import whole_numel

CLIP_NORM, RESULT = "train/clip_norm", "hp/val_loss"
INSIDE = ("activations", "updates", "attention")
# Charts of metrics that only some precisions record.
OF_LOSS_SCALING = {"loss scale": ["precision/loss_scale"], "skipped steps": ["precision/skipped_steps"]}
OF_FP8 = {
    "fp8: share": ["precision/fp8_share"],
    "fp8: underflow": ["precision/fp8_underflow_max", "fp8/(.*/)?(input|weight)_underflow"],
    "fp8: amax": ["fp8/(.*/)?(input|weight)_amax"],
}


def layout(train_loss: str, val_loss: str, names: Iterable[str]) -> dict[str, dict[str, list]]:
    """The layout of the custom-scalars tab: charts that every run has, and those for which `names` has a metric.

    It maps category -> chart -> `["Multiline", [regular expression, ...]]`, as torch's `add_custom_scalars` takes it.
    """
    names = list(names)
    charts = {
        "loss": [re.escape(train_loss), re.escape(val_loss)],
        "gradient norm before the clip": ["train/grad_norm", CLIP_NORM],
        "learning rate": [r"train/lr(/\d+)?"],
        "tokens per second": ["throughput/tokens_per_second"],
        "MFU": ["throughput/[mh]fu"],
        "memory, GiB": ["memory/.*_gib"],
        **_recorded(OF_LOSS_SCALING, names),
    }
    kinds = sorted({(name.split("/")[0], name.split("/")[-1]) for name in names if name.split("/")[0] in INSIDE})
    inside = {f"{room}: {kind}": [f"{room}/(.*/)?{re.escape(kind)}"] for room, kind in kinds}
    inside |= _recorded(OF_FP8, names)
    return {
        category: {title: ["Multiline", [f"^{tag}$" for tag in tags]] for title, tags in content.items()}
        for category, content in {"Run": charts, "Inside the model": inside}.items()
        if content
    }


def _recorded(charts: dict[str, list[str]], names: Iterable[str]) -> dict[str, list[str]]:
    """The charts that show at least one of `names`."""
    return {title: tags for title, tags in charts.items() if any(re.fullmatch("|".join(tags), name) for name in names)}


def pinned_link(tags: Iterable[str], port: int = 6006) -> str:
    """Address of TensorBoard's first page with the cards of `tags` pinned on top, their curves not smoothed.

    Source: `dashboard_deeplink_provider.ts`,
    https://github.com/tensorflow/tensorboard/blob/master/tensorboard/webapp/routes/dashboard_deeplink_provider.ts
    """
    cards = json.dumps([{"plugin": "scalars", "tag": tag} for tag in tags], separators=(",", ":"))
    return f"http://localhost:{port}/?pinnedCards={quote(cards, safe='')}&smoothing=0#timeseries"


def redirect_page(address: str) -> str:
    """An HTML page that leads a browser to an address which is too long to print."""
    target = html.escape(address)
    return (
        f'<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0; url={target}">\n'
        f'<title>TensorBoard</title><a href="{target}">The run in TensorBoard</a>, once TensorBoard is started\n'
    )


def facts(trainer: Any, pl_module: Any) -> dict[str, Any]:
    """Settings that every run has, for the recipe text."""
    wrapped = getattr(trainer.strategy, "model", None)
    sizes = list(_sizes(pl_module if wrapped is None else wrapped))
    return {
        "module": type(pl_module).__name__,
        "parameters": f"{sum(size for size, _ in sizes):,}",
        "trainable parameters": f"{sum(size for size, trained in sizes if trained):,}",
        "max_steps": trainer.max_steps,
        "precision": trainer.precision,
        "strategy": type(trainer.strategy).__name__,
        "devices": trainer.num_devices * trainer.num_nodes,
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
        "gradient_clip_val": trainer.gradient_clip_val,
        BACKEND: pl.__version__,
    }


def _sizes(root: Any) -> Iterator[tuple[int, bool]]:
    """Number of elements of each parameter as a whole, and whether it is trained; `root` as the strategy wrapped it."""
    for param in root.parameters():
        # a lazy parameter has no size yet; FSDP1's are shards, also where they look like the module's own
        if not hasattr(param, "materialize") and not getattr(param, "_fsdp_flattened", False):
            yield whole_numel(param), param.requires_grad
    for part in root.modules():
        if (handle := getattr(part, "_handle", None)) is not None and hasattr(handle, "flat_param"):
            flat_param = handle.flat_param  # read from torch/distributed/fsdp/_flat_param.py
            owners = flat_param._params or [flat_param] * len(flat_param._shapes)  # None without use_orig_params
            yield from zip(map(math.prod, flat_param._shapes), (p.requires_grad for p in owners), strict=True)


def table(values: Mapping[str, Any]) -> str:
    """`values` as a Markdown table."""
    rows = (f"| {name} | {str(value).replace('|', '&#124;')} |".replace("\n", " ") for name, value in values.items())
    return "\n".join(["| | |", "|---|---|", *rows])


def flat(values: Any, before: str = "") -> dict[str, Any]:
    """Numbers and short strings of nested mappings, by dotted name."""
    found: dict[str, Any] = {}
    for name, value in dict(values).items():
        if hasattr(value, "items"):
            found |= flat(value, f"{before}{name}.")
        elif isinstance(value, (bool, int, float, str)) and len(str(value)) < 100:
            found[before + str(name)] = value
    return found


def recipe_of(trainer: Any) -> tuple[str, Any] | None:
    """The YAML and the parsed values of the recipe if LightningCLI runs it: its SaveConfigCallback holds them."""
    for callback in trainer.callbacks:
        if hasattr(callback, "parser") and hasattr(callback, "config"):
            text = callback.parser.dump(callback.config, skip_none=False)  # as in config.yaml
            return yaml.safe_dump(_given(yaml.safe_load(text)), sort_keys=False), callback.config.as_dict()
    return None


def _given(values: Any) -> Any:
    """Nested settings without those that are null."""
    if isinstance(values, dict):
        return {name: _given(value) for name, value in values.items() if value is not None}
    return [_given(value) for value in values] if isinstance(values, list) else values
