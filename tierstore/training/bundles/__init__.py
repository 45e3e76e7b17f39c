"""Tensors that travel together: how they lie, where their bytes are, and what stands in for them."""
