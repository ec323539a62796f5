"""Goodput: which share of a run's wall time made progress, and where the rest went."""
