"""Checkpoints that survive: SafeCheckpoint, what it keeps, and the random state that it saves."""
