"""`fit`, `validate`, `test`, `predict` and `prepare` on a YAML recipe: Lightning's own command line, made kinder.

What it adds to LightningCLI: short class names for the whole collection, one line instead of a page for a mistake, our
progress bar, no automatic optimizer (the module owns it), and checkpoints that never override what the recipe says.
"""

import faulthandler
import inspect
import sys
import warnings
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from jsonargparse import Namespace

from lightning_tricks._errors import UsageError, one_line_and_exit
from lightning_tricks._exit import end_within
from lightning_tricks._lightning import pl, pl_import
from lightning_tricks._suggest import did_you_mean
from lightning_tricks.callbacks import PredictionWriter, RankMonitor, TrainingProgressBar
from lightning_tricks.checkpoints import FolderCheckpointIO
from lightning_tricks.cli.check_run import check_ckpt_path, check_folders, check_options
from lightning_tricks.cli.choose_checkpoint import choose_checkpoint
from lightning_tricks.cli.class_change import lines as class_change_lines
from lightning_tricks.cli.class_change import watch_class_changes
from lightning_tricks.cli.next_steps import next_steps
from lightning_tricks.cli.parse_errors import parse_message
from lightning_tricks.cli.program import program
from lightning_tricks.cli.quiet import without_advertisements
from lightning_tricks.cli.recipe_parser import RecipeParser, join_negative_numbers
from lightning_tricks.cli.recipe_text import check_values
from lightning_tricks.cli.run_errors import trainer_line, usage_errors
from lightning_tricks.cli.run_folder import RunFolder, RunStart
from lightning_tricks.mixins import OptimizerMixin

if TYPE_CHECKING:
    from lightning.pytorch.cli import LightningCLI
    from lightning.pytorch.strategies import Strategy
else:
    LightningCLI = pl_import("cli").LightningCLI
    Strategy = pl_import("strategies").Strategy

rank_zero_info = pl_import("utilities.rank_zero").rank_zero_info


class RecipeTrainer(pl.Trainer):
    """Lightning's Trainer, and the signature of our own `prepare`, which `RecipeCLI` carries out without a Trainer."""

    # The class before the name: jsonargparse takes `FSDP2Strategy` for a class, and `ddp`, which is none, for a name.
    def __init__(self, *args: Any, strategy: Strategy | str = "auto", **kwargs: Any) -> None:
        super().__init__(*args, strategy=strategy, **kwargs)

    def prepare(self, model: "pl.LightningModule", datamodule: "pl.LightningDataModule | None" = None) -> None:
        """Turn the recipe's text into token shards, and stop."""


class RecipeCLI(LightningCLI):
    """Run one recipe. Use it in place of LightningCLI to get the same command line around your own classes.

    Without `args` it is the whole program: it reads `sys.argv`, and a user's mistake is one line and exit code 2. With
    `args` it is called from Python, and a mistake is a `UsageError`.

    Args:
        model_class: As in LightningCLI; None for any that the recipe names.
        datamodule_class: As in LightningCLI; None for any that the recipe names.
        **kwargs: Those of LightningCLI.
    """

    def __init__(self, model_class: Any = None, datamodule_class: Any = None, **kwargs: Any) -> None:
        usage = "%(prog)s --config RECIPE.yaml [--config MORE.yaml] [--key.subkey VALUE ...]"
        common = {"allow_abbrev": False, "prog": program()}
        kwargs.setdefault(
            "parser_kwargs", common | {name: {"usage": usage, "allow_abbrev": False} for name in self.subcommands()}
        )
        kwargs.setdefault("parser_class", RecipeParser)
        kwargs.setdefault("trainer_class", RecipeTrainer)
        kwargs.setdefault("save_config_kwargs", {"overwrite": True})
        kwargs |= {"subclass_mode_model": True, "subclass_mode_data": True, "auto_configure_optimizers": False}
        self._run_folder = RunFolder()
        self._given = kwargs.get("args") or sys.argv[1:]
        lines = one_line_and_exit() if kwargs.get("args") is None else nullcontext()
        with lines, usage_errors(self._ckpt_path), without_advertisements():
            super().__init__(model_class, datamodule_class, **kwargs)

    def _ckpt_path(self) -> str | None:
        config = getattr(self, "config", {})  # none yet where parsing failed
        return config.get(f"{config.get('subcommand')}.ckpt_path")

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Lightning's, and `prepare`."""
        return {**LightningCLI.subcommands(), "prepare": {"model", "datamodule"}}

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> Any:
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        if subcommand == "predict":
            default = inspect.signature(PredictionWriter).parameters["output"].default
            parser.add_argument("--output", type=str, default=default, help="JSON lines of what predict_step returns")
        return parser

    def parse_arguments(self, parser: Any, args: Any) -> None:
        """Parse; say which settings a class that replaces another one takes over; refuse what would fail later."""
        with watch_class_changes() as changes:
            if isinstance(args, dict | Namespace):
                self.config = parser.parse_object(args)
            else:
                given = join_negative_numbers(sys.argv[1:] if args is None else args)
                check_values(given)
                self.config = parser.parse_args(given)
        config = self.config.get(self.config.get("subcommand") or "", self.config)
        check_options(config)
        for line in class_change_lines(changes, config.as_dict()):
            rank_zero_info(line)

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
        writers = (PredictionWriter, pl_import("callbacks").BasePredictionWriter)
        if self.subcommand == "predict" and not any(isinstance(c, writers) for c in callbacks):
            config["callbacks"] = [*(config.get("callbacks") or []), PredictionWriter(self.config["predict"]["output"])]
        summaries = pl_import("callbacks").ModelSummary
        if isinstance(self.model, OptimizerMixin) and not any(isinstance(c, summaries) for c in callbacks):
            # the table of the parameter groups says as much; `enable_model_summary: true` brings it back
            config["enable_model_summary"] = bool(config.get("enable_model_summary"))
        try:
            trainer = super().instantiate_trainer(**kwargs)
        except Exception as error:
            if isinstance(error, UsageError) or (line := trainer_line(error, config)) is None:
                raise
            raise UsageError(line) from error
        if self.subcommand:
            trainer.callbacks.insert(0, RunStart(self._run_folder))  # type: ignore[attr-defined]
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

    def _run_subcommand(self, subcommand: str) -> None:
        """Lightning's; a start that is refused leaves no folder."""
        with self._run_folder:
            super()._run_subcommand(subcommand)

    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        if subcommand != "prepare":
            given = self.config_init[subcommand]
            given["ckpt_path"] = choose_checkpoint(subcommand, given.get("ckpt_path"), self.trainer)
            self._check_before_data(subcommand, given["ckpt_path"])
            if not self.trainer.fast_dev_run:  # type: ignore[attr-defined]
                self._run_folder.choose(subcommand, given["ckpt_path"], self.trainer)
            if subcommand == "predict" and given.get("return_predictions") is None:
                given["return_predictions"] = False  # they are in the file; all of them would fill the memory
        return super()._prepare_subcommand_kwargs(subcommand)

    def _check_before_data(self, subcommand: str, ckpt_path: str | None) -> None:
        """Refuse what the recipe and its folders alone show to be wrong; a module may know more, in `check_run`."""
        check_ckpt_path(ckpt_path, self.trainer, resumes=subcommand == "fit")
        check_folders(self.trainer)
        if hasattr(self.model, "check_run"):
            self.model.check_run(self.trainer, self.datamodule, subcommand)

    def after_fit(self) -> None:
        """Say where the results are and what to do with them."""
        trainer = self.trainer
        if not trainer.is_global_zero or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        options = self._given[self._given.index("fit") + 1 :] if isinstance(self._given, list) else []
        optimizer = (self.config["fit"]["model"].get("init_args") or {}).get("optimizer") or {}
        print("", *next_steps(trainer, options, "lr" in (optimizer.get("init_args") or {})), sep="\n")


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
    cli = _Untrained(run=False, args=list(args))
    return cli.model, cli.datamodule, dict(cli.config_init["trainer"])


def main(args: list[str]) -> None:
    """Run `args` (a subcommand and its options); what the user can mend becomes a UsageError."""
    if args and args[0] not in RecipeCLI.subcommands() and not args[0].startswith("-"):
        names = [*RecipeCLI.subcommands(), "ls", "cp", "consolidate", "generate"]
        raise UsageError(f"unknown command {args[0]!r}{did_you_mean(args[0], names)}: --help lists them")
    sys.argv[1:] = args
    for noise in (".*isinstance.treespec, LeafSpec.*", "Precision .* is not supported by the model summary"):
        warnings.filterwarnings("ignore", message=noise)  # Lightning's own, and nothing that a user could mend
    try:
        RecipeCLI(args=args)
    finally:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            if sys.exc_info()[0] is not None:
                end_within(30.0)
            torch.distributed.destroy_process_group()
            faulthandler.cancel_dump_traceback_later()
