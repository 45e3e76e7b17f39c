"""A Trainer's script as it is, and the same offloaded: what `trainer-lines` counts the difference of."""
