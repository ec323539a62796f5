"""Averages of the weights along the run: EMA and TailAverage, kept beside the weights that are trained."""
