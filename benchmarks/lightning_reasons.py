"""Why some of Lightning's tests are another with our parts in the Trainer: what they ask that no run asks.

A row holds patterns of modes, of tests and of errors, and the reason; the first row that fits counts. The pattern of
errors says what must be in them, so that another failure of the same test is not explained by its row.
"""

_ALL = ".*"
_LOGGING = "monitors|StepGuard|SpikeRollback"
_SAFE = "SafeCheckpoint"
_LISTS = "compares the Trainer's list of callbacks, in which ours stand too"
_FILES = "lists a folder, in which our files stand too"
_LOGS = "compares everything that was logged, or every call of a logger: our metrics are there too"
_BAR = "reads Lightning's own progress bar, in whose place ours stands"
_CALLS = "compares the list of all calls of hooks and methods, in which ours stand too"
_MOCKS = "replaces a function of torch or Lightning by a mock, and counts or reads its calls"
_CLOCK = "ends by the clock, or replaces it"
_RANK = "says that there are several processes where there is one"
_NAMES = "expects the file names of ModelCheckpoint, or their number: here are two newest ones, and a link to the last"
_BEST = "expects of ModelCheckpoint a best score that is not a number, or a checkpoint that was never written"
_STATE = "expects the state of ModelCheckpoint in the checkpoint, or none of a second callback in the same folder"
_RANDOM = "goes back to a checkpoint, and SafeCheckpoint puts back the random state that is in it"
_DRAWS = "draws its data, or their order, from the random numbers that ExactResume sets"
_MID_EPOCH = "resumes in mid-epoch: here with the next batch of the same epoch, and not with the first one"
_PLACE = "looks for the place in a loader where Lightning writes it"
_WHOLE_STEPS = "expects the state in the middle of a step: here whole steps are saved, with what belongs to them"
_LOADER = "looks at the loader itself, in whose place one stands that knows its place"
_PRUNES = "prunes by a tensor of the module's last forward pass, the validation with the averaged weights"
_UNFROZEN = "resumes with a parameter that was frozen, and has no average"
_NO_BATCH = "trains no batch: Preemption leaves the loops' state out of a checkpoint before the first one"
_SEARCH = "fails in a search for a learning rate, of which Lightning tells no callback"
_MANUAL = "optimizes manually, so that the Trainer accumulates nothing"
_BATCH = "has a batch of several micro-batches, and the warmup of this mode ends with one"
_BUCKET = "saves to a bucket, or through a plugin that returns before the file is written"
_LBFGS = "trains with LBFGS, which computes several losses a step"
_BAREBONES = "turns logging off, and the callback reads the losses at log steps"

REASONS: tuple[tuple[str, str, str, str], ...] = (
    # what any callback meets
    (
        _ALL,
        r"callbacks/test_callbacks\.py::|test_callback_connector\.py::|test_trainer_reset_correctly",
        "assert",
        _LISTS,
    ),
    (_ALL, r"test_timer_|test_time_and_epoch_gated_val_check", "", _CLOCK),
    (
        _ALL,
        "test_fit_ckpt_path_epoch_restored",
        "^weights, random, steps; weights, steps$",
        "goes through files in any order",
    ),
    # what logs
    (_LOGGING, r"throughput_monitor|logging_/|loggers/|flow_scalar", "assert|'metrics'|Calls not found", _LOGS),
    (_LOGGING, "test_log_every_n_steps|test_multiple_optimizers_manual_log", "assert|Calls not found", _LOGS),
    ("StepGuard|SpikeRollback", "", "UsageError: (StepGuard|SpikeRollback): LBFGS", _LBFGS),
    ("SpikeRollback", "", r"UsageError: trainer\.log_every_n_steps=0", _BAREBONES),
    ("SpikeRollback", "test_tqdm_progress_bar_disabled_when_not_rank_zero", "NoneType", _RANK),
    # the monitors
    ("monitors", "", r"goodput\.json|ledger\.jsonl", _FILES),
    ("monitors", "test_current_score$", "Weights only load failed", _FILES),
    ("monitors", "progress_bar|tqdm|Rich", "TrainingProgressBar|TensorBoardDashboard|assert False|assert 0 > 0", _BAR),
    ("monitors", r"test_hooks\.py::|test_train_loop_system", "assert", _CALLS),
    ("monitors|GradientClippingMixin", "test_precision_16_clip_gradients", "to have been called", _MOCKS),
    ("monitors", "test_lr_scheduler_epoch_step_frequency", "MagicMock", _MOCKS),
    ("monitors", "test_skip_training_step_not_allowed", "rank-monitor", _RANK),
    (
        "monitors",
        "",
        r"UsageError: output='predictions\.jsonl' exists",
        "predicts twice: PredictionWriter overwrites no file",
    ),
    # SafeCheckpoint in the place of ModelCheckpoint
    (
        _SAFE,
        "resume|restor|load|ckpt|checkpoint|restart|lambda_call|step_and_epoch",
        "^(random|weights, random|random; weights, random)$",
        _RANDOM,
    ),
    (_SAFE, "tuner/|scale_batch_size", "^(random|weights, random|random; weights, random)$", _RANDOM),
    (_SAFE, "test_lr_finder_", "^weights, optimizers", _RANDOM),
    (_SAFE, r"test_checkpoint_path_input\[.*specific\]", "^weights$", "takes the first file that the folder lists"),
    (_SAFE, "test_checkpoint_callback_frequency", "BadZipFile", _MOCKS),
    (_SAFE, "nan_as_first|score_when_nan", "None", _BEST),
    (_SAFE, "test_current_score$", r"KeyError: .ModelCheckpoint", _STATE),
    (_SAFE, "test_resume_incomplete_callbacks_list_warning", "UsageError: SafeCheckpoint: dirpath=", _STATE),
    (_SAFE, "test_model_checkpoint_topk_zero", "step=128.ckpt' == ''", _NAMES),
    (_SAFE, "test_default_checkpoint_behavior|mlflow_log_model|wandb_log_model", "called|call", _MOCKS),
    (_SAFE, "", r"last\.ckpt|step=\d+\.ckpt'|foo=1-last", _NAMES),
    (_SAFE, "resume_and_old_checkpoint_files_remain|save_last_versioning", "assert", _NAMES),
    (_SAFE, r"test_hooks\.py::", "assert", _CALLS),
    (_SAFE, "test_model_checkpoint_save_last_as_link_not_local", "give a folder of this mach", _BUCKET),
    (_SAFE, "", "UsageError: (SafeCheckpoint: dirpath=memory:|plugins=AsyncCheckpointIO)", _BUCKET),
    (
        _SAFE,
        "",
        "UsageError: ckpt_path=.*there is no such file",
        "expects another exception for a file that is not there",
    ),
    (
        _SAFE,
        "checkpoint_path_input_last",
        "DID NOT WARN",
        "expects that there is no last checkpoint: there always is one",
    ),
    (
        _SAFE,
        "test_base_finetuning_internal",
        "does not require grad",
        "resumes after a validation, where Lightning's own fine-tuning fails after ModelCheckpoint, too",
    ),
    (
        _SAFE,
        "test_migrate_loop_batches_that_stepped",
        "assert 2 == 3",
        "takes a counter out of the checkpoint, as if it were one of Lightning 1.6.4",
    ),
    # averages
    ("EMA|TailAverage", "", r"^metrics(; metrics)*$", "validates with the averaged weights"),
    ("EMA|TailAverage", "test_pruning", "^weights", _PRUNES),
    ("EMA|TailAverage", r"throughput_monitor|logging_/|loggers/|flow_scalar", "assert|Calls not found", _LOGS),
    ("EMA|TailAverage", "test_finetuning_callback", "UsageError: ckpt_path=.*should have an average", _UNFROZEN),
    ("EMA|TailAverage", r"test_hooks\.py::", "assert", _CALLS),
    (
        "EMA|TailAverage",
        "test_early_stopping_cpu_model|test_lr_finder_with_early_stopping",
        "metrics$",
        "stops early by a metric of the averaged weights",
    ),
    # the size of the batch
    ("BatchSizeWarmup", "", r"UsageError: BatchSizeWarmup: \w+ optimizes manually", _MANUAL),
    ("BatchSizeWarmup", "", r"BatchSizeWarmup\.stages=\{0: 1\}: the last stage must be", _BATCH),
    ("BatchSizeWarmup", "", r"BatchSizeWarmup: with", "sets the batch by GradientAccumulationScheduler as well"),
    ("BatchSizeWarmup", r"test_manual_optimization\.py::test_lr_schedulers", "DID NOT WARN", _MANUAL),
    (
        "BatchSizeWarmup",
        r"throughput_monitor|logging_/|loggers/|flow_scalar|log_every_n",
        "assert|Calls not found",
        _LOGS,
    ),
    # leaving, and watching
    ("Preemption", "test_fit_loop_save_and_restore_dataloaders", "KeyError: 'loops'", _NO_BATCH),
    ("Preemption|HangWatchdog", "tuner/test_lr_finder.py::", "^steps$|hang-watchdog", _SEARCH),
    ("Preemption", "test_sigterm_handler_can_be_added", "Preempted: 143", "sends SIGTERM, on which Preemption leaves"),
    # places in the data
    ("ExactResume", "", r"^(weights|weights, metrics|metrics)(; (weights|weights, metrics|metrics))*$", _DRAWS),
    (
        "ExactResume",
        "test_restarting_mid_epoch_raises_warning",
        "did not match",
        "expects a warning that is not true here",
    ),
    ("ExactResume", "test_strict_loading|test_hpc_restore_attempt", "^weights, steps", _MID_EPOCH),
    ("ExactResume", "test_fit_loop_save_and_restore_dataloaders", "^steps$|combined_loader", _PLACE),
    (
        "ExactResume",
        "test_loop_state_on_exception|test_fit_can_fail_during_validation",
        "Differing items",
        _WHOLE_STEPS,
    ),
    ("ExactResume", "test_fit_loop_reset|test_result_collection_reload", "assert False", _WHOLE_STEPS),
    ("ExactResume", "test_plateau_scheduler_lr_step_interval", "assert 4 == ", _WHOLE_STEPS),
    (
        "ExactResume",
        "test_workers_are_shutdown|test_train_dataloader_passed_to_fit|test_request_dataloader",
        "assert",
        _LOADER,
    ),
    (
        "ExactResume",
        "",
        "UsageError: estimated_stepping_batches",
        "restores a checkpoint in the middle of a fit, or after it in its own code",
    ),
    ("ExactResume", "", "UsageError: reload_dataloaders_every_n_epochs", "makes new loaders in each epoch"),
    # the mixin
    (
        "GradientClippingMixin",
        "test_load_model_from_checkpoint",
        "object layout differs",
        "has a module whose class cannot be replaced while it runs",
    ),
)
