"""Runs side by side, and what their seeds can show; `comparison` is the middle of it."""
