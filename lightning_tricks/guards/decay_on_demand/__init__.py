"""A run without a fixed end is told to decay while it trains."""
