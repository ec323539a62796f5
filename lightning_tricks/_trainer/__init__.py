"""Lightning's private state: the only folder that reads it, and that compares the class names of Lightning's objects.

Each function names the place in Lightning 2.6.6 from which it was read. `tests/test_trainer.py` compares each answer
with the behaviour of a Trainer, and fails where another version differs. No file here imports Lightning, because a
Trainer may be of either package, `lightning` or `pytorch_lightning`.
"""

from lightning_tricks._trainer.around_saves import around_saves as around_saves
from lightning_tricks._trainer.loop import batch_progress as batch_progress
from lightning_tricks._trainer.loop import end_restart as end_restart
from lightning_tricks._trainer.loop import epoch_end_follows as epoch_end_follows
from lightning_tricks._trainer.loop import epoch_is_over as epoch_is_over
from lightning_tricks._trainer.loop import epoch_means as epoch_means
from lightning_tricks._trainer.loop import fetch_hooks as fetch_hooks
from lightning_tricks._trainer.loop import forget_running_batch as forget_running_batch
from lightning_tricks._trainer.loop import go_on_with_next_epoch as go_on_with_next_epoch
from lightning_tricks._trainer.loop import hook_at_epoch_end as hook_at_epoch_end
from lightning_tricks._trainer.loop import hooks_have_batch as hooks_have_batch
from lightning_tricks._trainer.loop import is_accumulating as is_accumulating
from lightning_tricks._trainer.loop import is_restarting as is_restarting
from lightning_tricks._trainer.loop import logged_in_training as logged_in_training
from lightning_tricks._trainer.loop import logging_step as logging_step
from lightning_tricks._trainer.loop import plateau_updates as plateau_updates
from lightning_tricks._trainer.loop import reopen_epoch as reopen_epoch
from lightning_tricks._trainer.loop import rewind_to_step as rewind_to_step
from lightning_tricks._trainer.loop import set_callback_metrics as set_callback_metrics
from lightning_tricks._trainer.loop import set_consumed as set_consumed
from lightning_tricks._trainer.loop import steps_in_epoch as steps_in_epoch
from lightning_tricks._trainer.loop import take_loops_step as take_loops_step
from lightning_tricks._trainer.loop import validation_follows as validation_follows
from lightning_tricks._trainer.loop import within_step as within_step
from lightning_tricks._trainer.module import clip_hook as clip_hook
from lightning_tricks._trainer.module import compiled_steps as compiled_steps
from lightning_tricks._trainer.module import configured_optimizers as configured_optimizers
from lightning_tricks._trainer.module import optimizer_index as optimizer_index
from lightning_tricks._trainer.module import set_device_mesh as set_device_mesh
from lightning_tricks._trainer.module import trainer_of as trainer_of
from lightning_tricks._trainer.module import unwrapped as unwrapped
from lightning_tricks._trainer.package import is_a as is_a
from lightning_tricks._trainer.package import lightning_file as lightning_file
from lightning_tricks._trainer.processes import dismiss_process_observer as dismiss_process_observer
from lightning_tricks._trainer.processes import launched_processes as launched_processes
from lightning_tricks._trainer.processes import signal_connector as signal_connector
from lightning_tricks._trainer.processes import sigterm_broadcast as sigterm_broadcast
from lightning_tricks._trainer.processes import slurm_checkpoint as slurm_checkpoint
from lightning_tricks._trainer.processes import slurm_environment as slurm_environment
from lightning_tricks._trainer.processes import store_before_the_run as store_before_the_run
from lightning_tricks._trainer.processes import trains_in_copies as trains_in_copies
from lightning_tricks._trainer.run_facts import Layout as Layout
from lightning_tricks._trainer.run_facts import RunFacts as RunFacts
from lightning_tricks._trainer.run_facts import data_rank as data_rank
from lightning_tricks._trainer.run_facts import enabled_scaler as enabled_scaler
from lightning_tricks._trainer.run_facts import equal_replicas as equal_replicas
from lightning_tricks._trainer.run_facts import is_alone as is_alone
from lightning_tricks._trainer.run_facts import loss_ranks as loss_ranks
from lightning_tricks._trainer.run_facts import micro_batch as micro_batch
from lightning_tricks._trainer.run_facts import opens_on_any_number as opens_on_any_number
from lightning_tricks._trainer.run_facts import planned_data_ranks as planned_data_ranks
from lightning_tricks._trainer.run_facts import random_rank as random_rank
from lightning_tricks._trainer.run_facts import reduce_over_all as reduce_over_all
from lightning_tricks._trainer.run_facts import run_facts as run_facts
from lightning_tricks._trainer.run_facts import weights_layout as weights_layout
from lightning_tricks._trainer.run_length import LastStep as LastStep
from lightning_tricks._trainer.run_length import is_last_step as is_last_step
from lightning_tricks._trainer.run_length import (
    micro_batches_before_validation as micro_batches_before_validation,
)
from lightning_tricks._trainer.run_length import run_length as run_length
from lightning_tricks._trainer.run_length import step_limit as step_limit
from lightning_tricks._trainer.running import RunningCall as RunningCall
from lightning_tricks._trainer.running import awaited_loader as awaited_loader
from lightning_tricks._trainer.running import describe_loader as describe_loader
from lightning_tricks._trainer.running import evaluation_progress as evaluation_progress
from lightning_tricks._trainer.running import is_compiling as is_compiling
from lightning_tricks._trainer.running import is_evaluating as is_evaluating
from lightning_tricks._trainer.running import line_of as line_of
from lightning_tricks._trainer.running import outwards as outwards
from lightning_tricks._trainer.running import running_part as running_part
from lightning_tricks._trainer.running import running_place as running_place
from lightning_tricks._trainer.running import stacks_of_threads as stacks_of_threads
from lightning_tricks._trainer.savers_and_loggers import choose_version as choose_version
from lightning_tricks._trainer.savers_and_loggers import chosen_version as chosen_version
from lightning_tricks._trainer.savers_and_loggers import folder_of_run as folder_of_run
from lightning_tricks._trainer.savers_and_loggers import has_default_checkpoint_io as has_default_checkpoint_io
from lightning_tricks._trainer.savers_and_loggers import has_versions as has_versions
from lightning_tricks._trainer.savers_and_loggers import last_saved_step as last_saved_step
from lightning_tricks._trainer.savers_and_loggers import next_version as next_version
from lightning_tricks._trainer.savers_and_loggers import shows_hp_metric as shows_hp_metric
from lightning_tricks._trainer.savers_and_loggers import steps_between_saves as steps_between_saves
from lightning_tricks._trainer.savers_and_loggers import steps_between_saves_of as steps_between_saves_of
