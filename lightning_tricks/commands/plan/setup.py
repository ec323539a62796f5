"""What kind of run a recipe is, read from its objects: devices, mesh, precision, batch. Builds no Trainer."""

import copy
import dataclasses
import re
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.protocols import CastsShards, KnowsPeak
from lightning_tricks._host.machine import devices_here, listed, named_devices
from lightning_tricks._trainer.objects import is_a
from lightning_tricks._trainer.run_facts import weights_layout
from lightning_tricks.language_model import LanguageModel
from lightning_tricks.parallel.dims import ParallelDims
from lightning_tricks.parallel.parallelize import ParallelOptions
from lightning_tricks.precision.bf16_true import to_bf16
from lightning_tricks.strategies import FSDP2Strategy

Kind = Literal["one", "ddp", "fsdp2", "zero"]
_DTYPES = {"bf16": torch.bfloat16, "16": torch.float16, "32": None, "64": None}
_STORED = {"bf16-true": torch.bfloat16, "16-true": torch.float16, "64-true": torch.float64, "64": torch.float64}


@dataclass(frozen=True)
class RunSetup:
    """A recipe on given devices.

    Attributes:
        module: of the recipe, not built yet; building it changes it, so that is done in a forked process.
        datamodule: of the recipe, or None.
        trainer: the Trainer's arguments, with classes as objects.
        nodes: hosts.
        devices: processes on each host.
        on_gpu: whether the kernels are those of a GPU.
    """

    module: Any
    datamodule: Any
    trainer: Mapping[str, Any]
    nodes: int
    devices: int
    on_gpu: bool

    @property
    def world(self) -> int:
        """Number of processes."""
        return self.nodes * self.devices

    @property
    def strategy(self) -> Any:
        """The Trainer's argument."""
        return self.trainer.get("strategy") or "auto"

    @property
    def kind(self) -> Kind:
        """How the weights lie on the devices.

        Raises:
            UsageError: a strategy of which the plan knows nothing.
        """
        strategy = self.strategy
        layout = "whole" if isinstance(strategy, str) else weights_layout(strategy)
        if layout in ("shards", "engine"):
            return "fsdp2" if layout == "shards" else "zero"
        if layout == "whole" and (not isinstance(strategy, str) or strategy.startswith(("auto", "ddp"))):
            return "one" if self.world == 1 else "ddp"
        name = strategy if isinstance(strategy, str) else type(strategy).__name__
        raise UsageError(f"plan: trainer.strategy={name}: the plan knows ddp, FSDP2Strategy and DeepSpeedZeROStrategy")

    @property
    def dims(self) -> ParallelDims:
        """Sizes of the mesh; replicas where the weights are not divided."""
        if self.kind == "fsdp2":
            return self.strategy.dims_of(self.world)
        return ParallelDims(replicate=self.world, shard=1)

    @property
    def micro_batches(self) -> int:
        """Micro-batches of an optimizer step on each data rank."""
        return int(self.trainer.get("accumulate_grad_batches") or 1)

    @property
    def rows(self) -> int:
        """Rows of a micro-batch; 0 where the data do not tell."""
        return int(getattr(self.datamodule, "micro_batch_size", 0) or 0)

    @property
    def length(self) -> int:
        """Tokens of a row; 0 where the data do not tell."""
        return int(getattr(self.datamodule, "seq_len", 0) or 0)

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on one rank."""
        return self.rows * self.length * self.dims.data_ranks // self.dims.loss_ranks

    @property
    def precision(self) -> str:
        """The Trainer's word for it, such as `bf16-mixed`."""
        if self.plugin is not None:
            if is_a(self.plugin, "AutoPrecision") and self.on_gpu:
                return "bf16-mixed"
            return str(getattr(self.plugin, "precision", "32-true"))
        return str(self.trainer.get("precision") or "32-true")

    @property
    def plugin(self) -> Any:
        """The precision plugin, or None."""
        return next((one for one in listed(self.trainer, "plugins") if is_a(one, "Precision")), None)

    @property
    def product_dtype(self) -> torch.dtype | None:
        """Of matrix products where it is not that of the weights."""
        return _DTYPES.get(self.precision.partition("-")[0])

    @property
    def peak_dtype(self) -> str:
        """Name of the column in a table of peaks."""
        if isinstance(self.plugin, KnowsPeak) and self.plugin.peak_dtype is not None:
            return self.plugin.peak_dtype
        tf32 = self.on_gpu and torch.get_float32_matmul_precision() != "highest"  # torch's default, for a run too
        words = {"bf16": "bf16", "16": "fp16", "32": "tf32" if tf32 else "fp32"}
        return words.get(self.precision.partition("-")[0], "fp32")

    @property
    def weights_dtype(self) -> torch.dtype:
        """Of weights and gradients where they are stored."""
        return _STORED.get(self.precision, torch.float32)

    @property
    def fp8(self) -> Any:
        """The plugin that multiplies in fp8, or None."""
        return self.plugin if is_a(self.plugin, "Float8") else None

    @property
    def traces_fp8(self) -> bool:
        """Whether the products in fp8 can run without data; those of mxfp8 are kernels of Blackwell alone."""
        return self.fp8 is not None and self.fp8.recipe != "mxfp8"

    def policy(self) -> MixedPrecisionPolicy:
        """FSDP2's casts."""
        if is_a(self.plugin, "AutoPrecision"):
            dtype = self.product_dtype if self.on_gpu else None
            return MixedPrecisionPolicy(dtype, torch.float32) if dtype else MixedPrecisionPolicy()
        return self.plugin.fsdp2_policy if isinstance(self.plugin, CastsShards) else MixedPrecisionPolicy()

    def forward_context(self) -> AbstractContextManager[Any]:
        """Autocast, where FSDP2 does not cast."""
        dtype = self.product_dtype
        if dtype is None or (self.kind == "fsdp2" and self.policy().param_dtype is not None):
            return nullcontext()
        caches = self.plugin is None  # Lightning's own autocast does; ours casts again for activation checkpointing
        return torch.autocast("cpu", dtype=dtype, cache_enabled=caches)

    @property
    def offloads(self) -> bool:
        """Whether shards and optimizer lie in the host's memory, and not in the device's."""
        return self.kind == "fsdp2" and self.on_gpu and self.strategy.cpu_offload

    def parallel_options(self) -> ParallelOptions:
        """How FSDP2Strategy divides the module; the trace runs it eager."""
        strategy: FSDP2Strategy = self.strategy
        offload = CPUOffloadPolicy(pin_memory=False) if self.offloads else OffloadPolicy()
        return strategy.options_with(convert=self.convert, policy=self.policy(), offload=offload)

    def convert(self, module: nn.Module) -> None:
        """What the precision plugin does to the layers before they are divided."""
        if self.weights_dtype == torch.bfloat16:
            to_bf16(module)
        elif self.weights_dtype != torch.float32:
            module.to(self.weights_dtype)
        if self.traces_fp8:
            self.fp8.convert_before_sharding(module, sharded=self.kind == "fsdp2")

    def build(self, depth: int | None = None) -> nn.Module:
        """Build the module on the meta device; of a LanguageModel with another number of blocks. Changes the module."""
        module = self.module
        if depth is not None:
            dense = getattr(module.config, "dense_layers", 0)  # at least one block with experts stays
            fewer = {"dense_layers": depth - 1} if dense >= depth else {}
            module.config = dataclasses.replace(module.config, n_layers=depth, **fewer)
            module.base_config = module.config if module.mup is None else module.mup.base_config(module.config)
        if getattr(module, "compile_blocks", False):  # the trace is eager, and torch's compiler loads slowly
            module.compile_blocks = False
        configure_on_meta(module)
        return module

    @property
    def is_ours(self) -> bool:
        """Whether the module is a LanguageModel, whose depth can be changed and whose batch is known."""
        return isinstance(self.module, LanguageModel)

    @property
    def blocks_alike(self) -> bool:
        """Whether `freeze` and rules treat all blocks alike, so that a few stand for all: no pattern has a number."""
        patterns = [getattr(rule, "pattern", "") for rule in getattr(self.module, "param_rules", None) or ()]
        return not re.search(r"\d", " ".join([*patterns, *(getattr(self.module, "freeze_patterns", None) or ())]))

    @property
    def compiles(self) -> bool:
        """Whether blocks are compiled, `auto` on a GPU only."""
        chosen = (getattr(part, "compile_blocks", False) for part in (self.module, self.strategy))
        return any(one is True or (one == "auto" and self.on_gpu) for one in chosen)

    @property
    def compiles_loss(self) -> bool:
        """Whether the decoder compiles the loss of its head, as it does on CUDA where it compiles its blocks itself."""
        return self.on_gpu and self.is_ours and bool(self.module.compile_blocks)

    def changed(self, **changes: Any) -> "RunSetup":
        """The same with other settings: `micro_batch_size`, `activation_checkpointing`, `nodes`, ..."""
        setup = dataclasses.replace(
            self,
            module=copy.copy(self.module),
            datamodule=copy.copy(self.datamodule),
            trainer={**self.trainer},
            **{name: changes.pop(name) for name in ("nodes", "devices") if name in changes},
        )
        settings: Any = setup.trainer
        for name, value in changes.items():
            if name in ("accumulate_grad_batches", "strategy", "plugins"):
                settings[name] = value
            elif name == "cpu_offload":
                settings["strategy"] = copy.copy(setup.strategy)
                settings["strategy"].cpu_offload = value
            else:
                setattr(setup.datamodule if name == "micro_batch_size" else setup.module, name, value)
        return setup


class NeedsValuesError(UsageError):
    """A module cannot be built without data, so nothing is known of it before a run, which may well succeed."""


def configure_on_meta(module: Any) -> None:
    """Call a module's `configure_model` with the meta device as the default, so that no weight is drawn.

    Raises:
        NeedsValuesError: it reads values of tensors, or refuses the device as transformers' `from_pretrained` does.
    """
    try:
        with torch.device("meta"):
            module.configure_model()
    except (NotImplementedError, RuntimeError) as error:
        said = str(error).strip().splitlines() or [""]
        if "meta" not in said[0]:
            raise
        raise NeedsValuesError(
            f"{type(module).__name__}: configure_model does not work on the meta device ({said[0][:150]}): what it "
            "builds is not known before a run"
        ) from error


def read_setup(
    module: Any, datamodule: Any, trainer: Mapping[str, Any], nodes: int | None, devices: int | None, on_gpu: bool
) -> RunSetup:
    """The setup of a recipe; `nodes` and `devices` win over its own."""
    nodes = nodes or int(trainer.get("num_nodes") or 1)
    devices = devices or named_devices(trainer) or devices_here(trainer)
    return RunSetup(module, datamodule, trainer, nodes, devices, on_gpu)
