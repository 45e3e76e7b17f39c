"""Activations that are computed again in backward."""
