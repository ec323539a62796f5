"""Callbacks that watch. None of them changes training: one battery of tests runs over all of them."""
