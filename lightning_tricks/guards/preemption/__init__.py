"""A run that is told to stop finishes its step, saves and leaves."""
