"""Commands on a recipe, Lightning's and our own: LightningCLI, with one line for a mistake.

The module owns its optimizer, and a checkpoint never overrides the recipe. Methods stand in the order of their calls.
"""

import importlib
import inspect
import math
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import yaml
from jsonargparse import Namespace, class_from_function

from lightning_tricks._core.errors import UsageError, one_line_and_exit
from lightning_tricks._core.quote import say
from lightning_tricks._core.replaced import replaced
from lightning_tricks._host.exit import end_within
from lightning_tricks._host.machine import listed
from lightning_tricks._trainer.lightning import pl, rank_zero_info
from lightning_tricks._trainer.objects import folder_of_run, is_a
from lightning_tricks.callbacks import PredictionWriter, Preemption, RankMonitor, TrainingProgressBar
from lightning_tricks.checkpoints import AtomicCheckpointIO
from lightning_tricks.cli.before_launch import check_before_launch
from lightning_tricks.cli.choose_checkpoint import EvaluatedStep, choose_checkpoint, choose_once, clear_choice
from lightning_tricks.cli.elastic import make_elastic
from lightning_tricks.cli.error_lines import parse_message, trainer_line, usage_errors, without_advertisements
from lightning_tricks.cli.fit_options import (
    FIT_OPTIONS,
    UNREAD,
    check_fit_options,
    check_options,
    choose_length,
    option_callbacks,
    settings_of_fit,
)
from lightning_tricks.cli.help import help_last
from lightning_tricks.cli.next_steps import go_on, next_steps, program
from lightning_tricks.cli.recipe_parser import (
    RecipeParser,
    RemoveCallback,
    join_negative_numbers,
    known_names_first,
    lightning_cli,
    watch_class_changes,
)
from lightning_tricks.cli.run_folder import RunFolder, SaveRecipe, check_folders, expand_save_dirs
from lightning_tricks.commands import COMMANDS, FitChange, Needs, Recipe
from lightning_tricks.commands.answers import check_json, write_json
from lightning_tricks.data.base import TokenDataModule
from lightning_tricks.data.text_data import TextData
from lightning_tricks.guards.preemption import Preempted
from lightning_tricks.language_model import LanguageModel
from lightning_tricks.mixins import OptimizerMixin

__all__ = ["RecipeCLI", "load_recipe"]

_ON_RECIPES = [one for one in COMMANDS.values() if one.module and one.needs in ("a recipe", "a Trainer")]
# What a Trainer of one process needs of the recipe: the places of its checkpoints, its length and its clip.
_KEPT = ("logger", "default_root_dir", "max_steps", "gradient_clip_val", "gradient_clip_algorithm")


class RecipeTrainer(pl.Trainer):
    """Lightning's Trainer, with our commands on recipes as static methods, from which LightningCLI takes options."""

    # The class stands before `str`, so that jsonargparse takes `FSDP2Strategy` for a class and `ddp` for a name.
    def __init__(self, *args: Any, strategy: pl.strategies.Strategy | str = "auto", **kwargs: Any) -> None:
        super().__init__(*args, strategy=strategy, **kwargs)

    @classmethod
    def of_one_process(cls, settings: Mapping[str, Any]) -> "RecipeTrainer":
        """A Trainer of one process on a CPU or GPU of this machine, whatever devices the recipe's `settings` name."""
        environments = importlib.import_module(f"{pl.__name__}.plugins.environments")
        return cls(
            accelerator="cpu" if settings.get("accelerator") == "cpu" else "auto",
            devices=1,
            plugins=[environments.LightningEnvironment(), AtomicCheckpointIO()],  # no job of SLURM, no torchrun
            callbacks=[one for one in listed(settings, "callbacks") if isinstance(one, pl.callbacks.Checkpoint)],
            enable_progress_bar=False,
            enable_model_summary=False,
            **{name: settings[name] for name in _KEPT if settings.get(name) is not None},
        )


_METHODS = {command.name: staticmethod(command.load().run) for command in _ON_RECIPES}
for _name, _method in _METHODS.items():
    setattr(RecipeTrainer, _name, _method)


class RecipeCLI(lightning_cli.LightningCLI):
    """Run one recipe. Use it in place of LightningCLI to get the same command line around your own classes.

    Without `args` it is the whole program: it reads `sys.argv`, and a user's mistake is one line and exit code 2. With
    `args` it is called from Python, and a mistake is a `UsageError`.

    Args:
        model_class: As in LightningCLI; None for any that the recipe names.
        datamodule_class: As in LightningCLI; None for any that the recipe names.
        change: What makes a `fit` another command of ours.
        **kwargs: The other arguments of LightningCLI.
    """

    def __init__(
        self,
        model_class: Callable[..., pl.LightningModule] | None = None,
        datamodule_class: Callable[..., pl.LightningDataModule] | None = None,
        change: FitChange | None = None,
        **kwargs: Any,
    ) -> None:
        self._change = change
        usage = f"{program()} {{}} --config RECIPE.yaml [--config MORE.yaml] [--key.subkey VALUE ...]"
        commands = {name: {"usage": usage.format(name), "allow_abbrev": False} for name in self.subcommands()}
        kwargs.setdefault("parser_kwargs", {"allow_abbrev": False, "prog": program(), **commands})
        kwargs.setdefault("parser_class", RecipeParser)
        kwargs.setdefault("trainer_class", RecipeTrainer)
        if "save_config_callback" not in kwargs:
            kwargs["save_config_callback"] = SaveRecipe
            kwargs["save_config_kwargs"] = {**kwargs.get("save_config_kwargs", {}), "save_to_log_dir": False}
        kwargs.setdefault("save_config_kwargs", {"overwrite": True, "multifile": False})
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
        """Lightning's commands and ours on recipes, and their parameters that are no options."""
        own = {command.name: {"model", "datamodule", "trainer"} for command in _ON_RECIPES}
        return {**lightning_cli.LightningCLI.subcommands(), **own}

    @property
    def _needs(self) -> Needs | None:
        """What a command of ours needs; None for Lightning's, and where a recipe is only built."""
        return next((command.needs for command in _ON_RECIPES if command.name == self.subcommand), None)

    def add_default_arguments_to_parser(self, parser: Any) -> None:
        """Lightning's `seed_everything`, and options of `fit` that may stand in a recipe, which other commands read."""
        super().add_default_arguments_to_parser(parser)
        for name, (kind, default, text) in FIT_OPTIONS.items():
            parser.add_argument(f"--{name}", type=kind, default=default, help=text)
        parser.add_argument("--trainer.callbacks-", action=RemoveCallback, metavar="CLASS")

    def _add_subcommands(self, parser: Any, **kwargs: Any) -> None:
        """Lightning's, which takes the options of our commands too from the Trainer's class, also from a user's own."""
        given = self.trainer_class
        cls = given if isinstance(given, type) else class_from_function(given)
        if not issubclass(cls, RecipeTrainer):
            self.trainer_class = type(cls.__name__, (cls,), dict(_METHODS))  # a Trainer is made of `given`
        try:
            super()._add_subcommands(parser, **kwargs)
        finally:
            self.trainer_class = given

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> Any:
        given = [name for name in self.subcommands() if name in self._given]
        if given and subcommand not in given:
            return self.init_parser(**kwargs)  # its options are not needed, and take 0.05 s
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        for name in {"ckpt_path", "weights_only"} - {action.dest for action in parser._actions}:
            parser.add_argument(f"--{name}", type=Any, default=None, help=UNREAD)  # the config.yaml of a run has them
        if subcommand == "predict":
            default = inspect.signature(PredictionWriter).parameters["output"].default
            parser.add_argument("--output", type=str, default=default, help="JSON lines of what predict_step returns")
        if subcommand == "validate":
            text = "a file, folder or glob of text to evaluate, instead of the recipe's validation data"
            parser.add_argument("--text", type=str | None, default=None, help=text)
        if subcommand in ("validate", "test"):
            text = "write the figures as JSON to this file, - for standard output"
            parser.add_argument("--json", type=str | None, default=None, help=text)
        return parser

    def parse_arguments(self, parser: Any, args: Any) -> None:
        """Parse, refuse values that would fail later, and say what a class that replaces another one keeps."""
        given: list[str] = []
        with watch_class_changes() as changes, known_names_first():
            if isinstance(args, dict | Namespace):
                self.config = parser.parse_object(args)
            else:
                given = help_last(join_negative_numbers(sys.argv[1:] if args is None else args))
                self.config = parser.parse_args(given)
        command = self.config.get("subcommand")
        config = self.config.get(command or "", self.config)
        unread = [action.dest for action in self._parser(command)._actions if action.help == UNREAD] if command else []
        check_fit_options(given, command, config, unread)
        check_options(config)
        expand_save_dirs(config.get("trainer") or {})
        if line := choose_length(config, given):
            rank_zero_info(line)
        for line in changes:
            rank_zero_info(line)
        if self._change is not None:
            self._change.change(config)

    def _set_seed(self) -> None:
        """Lightning's, in silence: `fit` says the seed when the run is known to start."""
        with replaced(lightning_cli, "seed_everything", partial(pl.seed_everything, verbose=False)):
            super()._set_seed()

    def _parse_ckpt_path(self) -> None:
        """Leave the recipe alone: LightningCLI would let a checkpoint's hyper-parameters override it silently."""

    def _dump_config(self) -> None:
        """Lightning's, of the text that `config.yaml` gets too."""
        may_have_links = type(self).add_arguments_to_parser is not RecipeCLI.add_arguments_to_parser
        if hasattr(self, "config_dump") or self.subcommand is None or may_have_links:
            super()._dump_config()
            return
        text = self._parser(self.subcommand).dump(self.config[self.subcommand], skip_none=False)
        self.config_dump = yaml.safe_load(text)

    def instantiate_classes(self) -> None:
        """Build the recipe's objects; where a list's member refuses its options, say only that.

        The model then knows the sizes of its data, in each command.
        """
        try:
            super().instantiate_classes()
        except ValueError as error:
            if "Does not validate against any of the Union subtypes" not in str(error):
                raise
            raise UsageError(parse_message(str(error)).complaints[0]) from error
        if isinstance(self.model, LanguageModel):
            self.model.follow_data(self.datamodule)

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        """Lightning's Trainer with our callbacks and with checkpoints in folders."""
        config = self._get(self.config_init, "trainer")
        if self._needs == "a recipe":
            return RecipeTrainer  # a class will do: the recipe's devices need not exist here
        if self._needs == "a Trainer":
            return RecipeTrainer.of_one_process(config)
        if (
            self.subcommand == "fit"
            and self.config_init["fit"]["elastic"]
            and torch.distributed.is_torchelastic_launched()
        ):
            rank_zero_info(make_elastic(self.config_init["fit"], self.model, self.datamodule, os.environ))
        self._add_callbacks(config)
        try:
            trainer: Any = super().instantiate_trainer(**kwargs)
        except Exception as error:
            if isinstance(error, UsageError) or (line := trainer_line(error, config)) is None:
                raise
            raise UsageError(line) from error
        if self.subcommand:
            trainer.callbacks.insert(0, self._run_folder)
        if trainer.world_size > 1 and not any(isinstance(callback, RankMonitor) for callback in trainer.callbacks):
            trainer.callbacks.insert(0, RankMonitor())  # the first to hear of an exception
        if type(trainer.strategy.checkpoint_io) is pl.plugins.TorchCheckpointIO:
            trainer.strategy.checkpoint_io = AtomicCheckpointIO()  # so that a sharded checkpoint opens here as well
        return trainer

    def _add_callbacks(self, config: Any) -> None:
        """Add progress bar, prediction writer and Preemption to the settings, unless the recipe has its own or none."""
        callbacks = listed(config, "callbacks")

        def has(*classes: type) -> bool:
            return any(isinstance(callback, classes) for callback in callbacks)

        if config.get("enable_progress_bar") is not False and not has(pl.callbacks.ProgressBar):
            callbacks = [TrainingProgressBar(), *callbacks]
        if self.subcommand == "predict" and not has(PredictionWriter, pl.callbacks.BasePredictionWriter):
            callbacks = [*callbacks, PredictionWriter(self.config["predict"]["output"])]
        if self.subcommand in ("validate", "test", "predict"):
            callbacks = [EvaluatedStep(), *callbacks]
        if self.subcommand == "fit" and not has(Preemption):
            callbacks = [*callbacks, Preemption()]
        config["callbacks"] = callbacks
        if isinstance(self.model, OptimizerMixin) and not has(pl.callbacks.ModelSummary):
            # the table of the parameter groups says as much; `enable_model_summary: true` brings it back
            config["enable_model_summary"] = bool(config.get("enable_model_summary"))

    def _run_subcommand(self, subcommand: str) -> None:
        """Lightning's, and what to do after a stop."""
        trainer: Any = self.trainer
        given = self.config_init[subcommand]
        try:
            file = self._change.json if self._change else given.get("json") if self._needs is None else None
            with warnings.catch_warnings(), check_json(subcommand, file):  # `RunFolder.choose` adds a filter
                super()._run_subcommand(subcommand)
            if file is not None and trainer.is_global_zero:
                figures = {name: float(value) for name, value in trainer.callback_metrics.items()}
                run = {"checkpoint": given["ckpt_path"], "step": trainer.global_step, "folder": folder_of_run(trainer)}
                write_json(file, run | {"metrics": figures})
        except Preempted as stop:
            if trainer.is_global_zero and stop.checkpoint:
                say(go_on(trainer, self._options(), stop.checkpoint), file=sys.stderr)
            raise
        except SystemExit as stop:  # Lightning 2.6's on SIGTERM says success; later releases, 143
            stop.code = 143 if is_a(stop, "SIGTERMException") else stop.code
            raise
        finally:
            clear_choice()

    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        """The arguments of a command, after its start."""
        given = self.config_init[subcommand]
        self._start(subcommand, given)
        kwargs = super()._prepare_subcommand_kwargs(subcommand)
        if self._needs is not None:
            of_recipe = settings_of_fit(given, given["trainer"])
            kwargs |= {"trainer": of_recipe if self._needs == "a recipe" else self.trainer}
            kwargs.setdefault("datamodule", None)
            for name in COMMANDS[subcommand].recipes:
                kwargs[name] = _more_recipe(name, given[name])
        return kwargs

    def _start(self, command: str, options: Any) -> None:
        """All that happens between the objects of a recipe and the first hook of Lightning, step by step.

        A run that cannot be is refused here, before any data are prepared and any other process is started.
        """
        trainer: Any = self.trainer
        if self._needs == "a Trainer" and "ckpt_path" in options:
            options["ckpt_path"] = choose_checkpoint(command, options["ckpt_path"], trainer)
        if self._needs is not None:
            return  # a command of ours makes no run
        # 1. The checkpoint from which it starts.
        checkpoint = options["ckpt_path"] = choose_once(command, options, trainer)
        # 2. Callbacks for options of `fit`.
        if command == "fit":
            trainer.callbacks[:0] = option_callbacks(options, self.model)
        # 3. The text of `validate --text`, all of it, whatever the recipe says of its own data.
        if command == "validate" and options["text"] is not None:
            self.datamodule = _text_to_score(options["text"], checkpoint, self.datamodule)
            trainer.limit_val_batches = 1.0
        # 4. Folders that can be written.
        check_folders(trainer)
        # 5. What this machine, or the recipe's parts together, cannot do.
        check_before_launch(trainer, self.model, self.datamodule, command, options["trainer"]["accelerator"])
        # 6. The folder of the run.
        if not trainer.fast_dev_run:
            self._run_folder.choose(command, None if self._change else checkpoint, trainer)
        # 7. What makes this `fit` another command.
        if self._change is not None:
            self._change.check(trainer)
        if command == "fit" and options["seed_everything"] is not False:
            rank_zero_info(f"Seed set to {options['seed_everything']}")
        # 8. Predictions go to their file; all of them would fill the memory.
        if command == "predict" and options.get("return_predictions") is None:
            options["return_predictions"] = False

    def _options(self) -> list[str]:
        """The options of `fit` as typed; none where the recipe was given from Python."""
        more = self._change.options() if self._change is not None else []
        return [*self._given[self._given.index("fit") + 1 :], *more] if isinstance(self._given, list) else []

    def after_fit(self) -> None:
        """Say where the results are and what to do with them."""
        trainer: Any = self.trainer
        if not trainer.is_global_zero or trainer.fast_dev_run:
            return
        say("", *next_steps(trainer, self._options()))


class _Untrained(RecipeCLI):
    """Builds a recipe's module and data, but no Trainer: the recipe's devices need not exist here."""

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        return None


def load_recipe(*args: str) -> tuple["pl.LightningModule", "pl.LightningDataModule | None", dict[str, Any]]:
    """Build a recipe's module and data without a Trainer, on any machine.

    Args:
        *args: As on the command line, without the command: `"--config", "recipes/tiny.yaml"`, and overrides.

    Returns:
        The module (its decoder not built yet), the data module, and the Trainer's arguments, with classes as objects.
    """
    return _objects(_Untrained(run=False, args=list(args)))


def _objects(cli: _Untrained) -> tuple["pl.LightningModule", "pl.LightningDataModule | None", dict[str, Any]]:
    return cli.model, cli.datamodule, settings_of_fit(cli.config_init, cli.config_init["trainer"])


def _text_to_score(files: str, checkpoint: str | None, data: Any) -> TextData:
    """The data of `validate --text`, in rows as the recipe's data have them."""
    if checkpoint is None:
        raise UsageError(f"text={files!r}: needs --ckpt_path, a checkpoint whose tokenizer encodes the text")
    if not isinstance(data, TokenDataModule):
        raise UsageError(f"text={files!r}: the recipe's data must be TextData or TokenData, which say the rows")
    names = ("seq_len", "micro_batch_size", "num_workers", "document_ids", "text_field", "cache_dir")
    return TextData.held_out(files, checkpoint, **{name: getattr(data, name) for name in names if hasattr(data, name)})


def _more_recipe(option: str, file: str | None) -> Recipe | None:
    """The recipe of an option that names one more; its errors name the option too."""
    if file is None:
        return None
    try:
        return Recipe(file, *load_recipe("--config", file))
    except UsageError as error:
        raise UsageError(f"{option}={file}: {error}") from error


def main(args: list[str]) -> None:
    """Run a command on a recipe, of which `args` are the words; its process group ends with it."""
    sys.argv[1:] = args  # with which other ranks are started
    for noise in (
        ".*isinstance.treespec, LeafSpec.*",
        "Precision .* is not supported by the model summary",
        r"FSDP2-wrapped module \(FSDPEmbedding\) returned a view",  # with tensor ranks
    ):
        warnings.filterwarnings("ignore", message=noise)  # nothing that a user could mend
    given, change = list(args), None
    if args[0] == "config-schema":
        importlib.import_module("lightning_tricks.cli.config_schema").run(args[1:])
        return
    if (command := COMMANDS.get(args[0])) is not None and command.needs == "settings":
        recipe, work = command.load().run(given[1:])
        cli = _Untrained(run=False, args=recipe)
        work(*_objects(cli), yaml.safe_load(cli.parser.dump(cli.config, skip_none=False)))
        return
    if command is not None and command.needs == "a fit":
        recipe, change = command.load().run(given[1:])
        given = ["fit", *recipe]
    try:
        RecipeCLI(args=given, change=change)
    finally:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            deadline = end_within(30.0 if sys.exc_info()[0] is not None else math.inf)
            torch.distributed.destroy_process_group()
            deadline.cancel()
