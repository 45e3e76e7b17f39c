"""What a user writes: checked as a whole before any of it applies.

Rule 1: a configuration that exists is valid.  Making one checks every field and raises one
`ConfigError` that lists all faults, each with its key, the value given and what is accepted.
Rule 2: fields hold checked values: sizes are bytes, ratios floats, targets lower case.
Rule 3: what depends on the machine (the accelerator, free memory, free disk) is asked for when a
store's configuration is made, never earlier.

Knows the names of backends and their options, but not what the backends do with them.
"""

from tierstore.config.schema import OffloadConfig, Size, StoreConfig, TierConfig

__all__ = ["OffloadConfig", "Size", "StoreConfig", "TierConfig"]
