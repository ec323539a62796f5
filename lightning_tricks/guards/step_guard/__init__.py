"""Steps whose loss or gradient norm is out of bounds are skipped, and named with their data."""
