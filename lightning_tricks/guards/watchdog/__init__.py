"""A rank that fails, dies or stands still is named on every rank, and none outlives it."""
