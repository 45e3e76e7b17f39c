"""The store against a dict that never runs out of memory."""
