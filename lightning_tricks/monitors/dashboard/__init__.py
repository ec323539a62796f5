"""TensorBoard's pages: the run's settings, the planned lr, and charts in a sensible order."""
