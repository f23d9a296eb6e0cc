"""Optimizers that keep their state in a low-rank basis of the gradient."""

from comera_lab.optimizers.coap import COAPAdamW

__all__ = ["COAPAdamW"]
