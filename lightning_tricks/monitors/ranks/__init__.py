"""The first failure among the processes of a run, told to all of them."""
