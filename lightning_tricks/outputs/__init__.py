"""Callbacks that write something for people: texts, tables, files. Like `monitors`, none of them changes training."""
