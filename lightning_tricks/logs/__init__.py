"""What a finished or running run says: `runs`, `doctor`, `compare` and `ledger` read its logs once. Loads no torch.

From the first to the last: `event_file` and `scalars` read a run's folder, `run` has its figures and settings,
`run_log` its metrics as series; `symptoms`, `comparison` and `ledger_diff` ask questions of them; `scaling_law`,
`decay_forecast` and `branch_forecast` tell losses of runs to come; `table` and `page` show the answers, which the
commands put together. What is read may be a stranger's: see `_core.foreign_files`.
"""
