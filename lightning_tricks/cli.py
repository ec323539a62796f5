"""`fit`, `validate`, `test`, `predict` and `prepare` on a YAML recipe: Lightning's own command line, made kinder.

What it adds to LightningCLI: short class names for the whole collection, one line instead of a page for a mistake, our
progress bar, no automatic optimizer (the module owns it), and checkpoints that never override what the recipe says.
"""

import faulthandler
import inspect
import os
import re
import sys
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import torch

# Imported for their class names, which a recipe then writes without the module's path.
import lightning_tricks.callbacks
import lightning_tricks.data
import lightning_tricks.language_model
import lightning_tricks.loggers
import lightning_tricks.precision
import lightning_tricks.strategies  # noqa: F401
from lightning_tricks._errors import UsageError
from lightning_tricks._lightning import pl, pl_import
from lightning_tricks._parse_errors import did_you_mean, one_line, parse_message
from lightning_tricks.callbacks import RankMonitor, TrainingProgressBar
from lightning_tricks.callbacks.rank_monitor import end_within
from lightning_tricks.checkpoints import FolderCheckpointIO, check_checkpoint
from lightning_tricks.loggers import choose_folder
from lightning_tricks.models import DecoderConfig
from lightning_tricks.schedules import Schedule

if TYPE_CHECKING:
    from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
    from lightning.pytorch.utilities.exceptions import MisconfigurationException
else:
    LightningArgumentParser = pl_import("cli").LightningArgumentParser
    LightningCLI = pl_import("cli").LightningCLI
    MisconfigurationException = pl_import("utilities.exceptions").MisconfigurationException
    # So that recipes may name Lightning's own classes shortly, too.
    pl_import("callbacks"), pl_import("loggers"), pl_import("strategies")


class RecipeParser(LightningArgumentParser):
    """A parser whose errors are one line, with the nearest known name."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise the cause of a failed parse as a UsageError; a parser nested in another one reports to that one."""
        if not self.exit_on_error:
            super().error(message, ex)
        parser = getattr(ex, "subcommand_parser", None) or self
        options = [option.lstrip("-") for action in parser._actions for option in action.option_strings]
        raise UsageError(one_line(parse_message(message), options, nameable_classes())) from None


def nameable_classes() -> dict[str, list[str]]:
    """Every class that a recipe may name shortly, with its parameters' names."""
    bases: list[type] = [
        pl.Callback,
        pl.LightningModule,
        pl.LightningDataModule,
        pl_import("loggers").Logger,
        pl_import("strategies").Strategy,
        pl_import("plugins").Precision,
        torch.optim.Optimizer,
        Schedule,
        DecoderConfig,
    ]
    return {cls.__name__: _parameters(cls) for base in bases for cls in _subclasses(base)}


def _subclasses(base: type) -> Iterator[type]:
    children: list[type] = base.__subclasses__()
    for child in children:
        yield child
        yield from _subclasses(child)


def _parameters(cls: type) -> list[str]:
    """Names of the constructor's parameters, with those that `**kwargs` hands to the next class in the bases."""
    return [
        name
        for owner in cls.__mro__
        if "__init__" in vars(owner)
        for name, parameter in inspect.signature(owner.__init__).parameters.items()  # type: ignore[misc]
        if name != "self" and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]


class RecipeTrainer(pl.Trainer):
    """Lightning's Trainer, and the signature of our own `prepare`, which `RecipeCLI` carries out without a Trainer."""

    def prepare(self, model: "pl.LightningModule", datamodule: "pl.LightningDataModule | None" = None) -> None:
        """Turn the recipe's text into token shards, and stop."""


class RecipeCLI(LightningCLI):
    """Run one recipe. Use it in place of LightningCLI to get the same command line around your own classes.

    Args:
        **kwargs: Those of LightningCLI.
    """

    def __init__(self, **kwargs: Any) -> None:
        usage = "%(prog)s --config RECIPE.yaml [--config MORE.yaml] [--key.subkey VALUE ...]"
        common = {"allow_abbrev": False, "prog": "lightning-tricks"}
        kwargs.setdefault(
            "parser_kwargs", common | {name: {"usage": usage, "allow_abbrev": False} for name in self.subcommands()}
        )
        kwargs.setdefault("parser_class", RecipeParser)
        kwargs.setdefault("trainer_class", RecipeTrainer)
        kwargs.setdefault("save_config_kwargs", {"overwrite": True})
        super().__init__(subclass_mode_model=True, subclass_mode_data=True, auto_configure_optimizers=False, **kwargs)

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Lightning's, and `prepare`."""
        return {**LightningCLI.subcommands(), "prepare": {"model", "datamodule"}}

    def _parse_ckpt_path(self) -> None:
        """Leave the recipe alone: LightningCLI would let a checkpoint's hyper-parameters override it silently."""

    def instantiate_classes(self) -> None:
        """Build what the recipe names; where a list's member refuses its options, say that and not the whole search."""
        try:
            super().instantiate_classes()
        except ValueError as error:
            if "Does not validate against any of the Union subtypes" not in str(error):
                raise
            raise UsageError(parse_message(str(error)).complaint) from error

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        """Lightning's Trainer with our progress bar, unless the recipe brings one or wants none, and RankMonitor."""
        if self.subcommand == "prepare":
            return self.trainer_class  # a class will do: the recipe's devices need not exist here
        config = self._get(self.config_init, "trainer")
        bars = pl_import("callbacks").ProgressBar
        callbacks = config.get("callbacks") or []
        callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
        if config.get("enable_progress_bar") is not False and not any(isinstance(c, bars) for c in callbacks):
            config["callbacks"] = [TrainingProgressBar(), *callbacks]
        try:
            trainer = super().instantiate_trainer(**kwargs)
        except (MisconfigurationException, ValueError, TypeError) as error:
            message = "trainer: " + re.sub(r"\s+", " ", str(error))
            if "FSDPPrecision" in message:  # Lightning names the class that FSDP1 wants, and not what to write
                message += ": set trainer.precision in place of the plugin, or shard with FSDP2 (FSDP2Strategy)"
            raise UsageError(message) from error
        monitors = [callback for callback in trainer.callbacks if isinstance(callback, RankMonitor)]  # type: ignore[attr-defined]
        if trainer.world_size > 1 and not monitors:
            trainer.callbacks.insert(0, RankMonitor())  # type: ignore[attr-defined]  # the first to hear of an exception
        if type(trainer.strategy.checkpoint_io) is pl_import("plugins.io").TorchCheckpointIO:
            trainer.strategy.checkpoint_io = FolderCheckpointIO()  # so that a sharded checkpoint opens here as well
        return trainer

    def prepare(self, model: "pl.LightningModule", datamodule: "pl.LightningDataModule | None" = None) -> None:
        """Turn the recipe's text into token shards, and stop."""
        if datamodule is None:
            raise UsageError("prepare: the recipe has no data")
        datamodule.prepare_data()
        datamodule.setup("fit")
        if hasattr(datamodule, "data_summary"):
            print(datamodule.data_summary())

    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        for logger in self.trainer.loggers if subcommand != "prepare" else []:
            choose_folder(logger, subcommand, resumes=bool(self.config[subcommand].get("ckpt_path")))
        self._check_ckpt_path(self.config[subcommand].get("ckpt_path"))
        return super()._prepare_subcommand_kwargs(subcommand)

    def _check_ckpt_path(self, path: str | None) -> None:
        """Refuse what cannot be opened now; later the ranks of a distributed run would be up and waiting."""
        if not path or path in ("best", "last", "hpc") or path.startswith("registry") or self.subcommand == "prepare":
            return
        strategy = self.trainer.strategy
        ours = isinstance(strategy.checkpoint_io, FolderCheckpointIO)
        if ours and not any("DeepSpeed" in cls.__name__ for cls in type(strategy).__mro__):
            check_checkpoint(path, resumes=self.subcommand == "fit")

    def after_fit(self) -> None:
        """Say where the results are and what to do with them."""
        trainer = self.trainer
        if not trainer.is_global_zero or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        for logger in trainer.loggers:
            if isinstance(logger, pl_import("loggers").TensorBoardLogger):
                print(
                    f"\nTensorBoard: tensorboard --logdir {_short(logger.root_dir)}   then open http://localhost:6006"
                )
        saver = trainer.checkpoint_callback
        checkpoint = _short(getattr(saver, "last_model_path", "") or getattr(saver, "best_model_path", ""))
        command = f"python -m lightning_tricks fit --config {self._recipe()}"
        if checkpoint:
            print(f"Evaluate:    {command.replace(' fit ', ' validate ')} --ckpt_path {checkpoint}")
            print(f"Go on:       {command} --ckpt_path last --trainer.max_steps {2 * trainer.global_step}")
        print(f"Try next:    {command} --model.init_args.optimizer.init_args.lr 1e-3")
        print("             python -m lightning_tricks ls   lists the other recipes")

    def _recipe(self) -> str:
        paths = self.config[self.subcommand].get("config") or ["RECIPE.yaml"]
        return _short(str(paths[0]))


def _short(path: str) -> str:
    """The path from here, where it lies below this folder."""
    here = os.getcwd() + os.sep
    return path.removeprefix(here)


class _Untrained(RecipeCLI):
    """Builds what a recipe says, but no Trainer: its devices need not exist here."""

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        return None


def load_recipe(*args: str) -> tuple["pl.LightningModule", "pl.LightningDataModule | None", dict[str, Any]]:
    """Build a recipe's module and data without a Trainer, on any machine.

    Args:
        *args: As on the command line, without the command: `"--config", "recipes/tiny.yaml"`, and overrides.

    Returns:
        The module (its decoder not built yet), the data module, and the Trainer's arguments with strategy, plugins,
        callbacks and logger as objects.
    """
    argv, sys.argv = sys.argv, sys.argv[:1]  # LightningCLI warns where both are given
    try:
        cli = _Untrained(run=False, args=list(args))
    finally:
        sys.argv = argv
    return cli.model, cli.datamodule, dict(cli.config_init["trainer"])


def main(args: list[str]) -> None:
    """Run `args` (a subcommand and its options); what the user can mend becomes a UsageError."""
    if args and args[0] not in RecipeCLI.subcommands() and not args[0].startswith("-"):
        names = [*RecipeCLI.subcommands(), "ls", "cp", "consolidate"]
        raise UsageError(f"unknown command {args[0]!r}{did_you_mean(args[0], names)}: --help lists them")
    sys.argv[1:] = args
    for noise in (".*isinstance.treespec, LeafSpec.*", "Precision .* is not supported by the model summary"):
        warnings.filterwarnings("ignore", message=noise)  # Lightning's own, and nothing that a user could mend
    try:
        RecipeCLI()
    except MisconfigurationException as error:
        raise UsageError(re.sub(r"\s+", " ", str(error))) from error
    except RuntimeError as error:
        if type(error).__module__ != "torch.distributed" or torch.distributed.is_initialized():
            raise
        reason = str(error).strip().partition("\n")[0]
        raise UsageError(
            f"this process has waited in vain for the others to start ({reason}): start all of them with the same "
            "command, or set trainer.strategy.init_args.timeout_seconds higher"
        ) from error
    finally:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            if sys.exc_info()[0] is not None:
                end_within(30.0)
            torch.distributed.destroy_process_group()
            faulthandler.cancel_dump_traceback_later()
