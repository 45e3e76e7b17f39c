"""A failure at every point where one can happen."""
