"""One line a step about the data, the random state, the loss and the weights: what runs are compared by."""
