"""Steps of optimizers, and what they keep."""
