"""Write one line a step about the data, the random state, the loss and the weights, to compare two runs by."""
