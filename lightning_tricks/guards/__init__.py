"""Callbacks that act. The first line of each docstring says what it changes."""
