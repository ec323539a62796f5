"""Scores on the tasks of lm_eval: a model as that library asks it, and the callback that runs it at validations."""
