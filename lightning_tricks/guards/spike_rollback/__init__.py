"""A run whose loss stays too high goes back to earlier weights, and on with the next data."""
