"""Optimizers that keep their state in a low-rank basis of the gradient."""
