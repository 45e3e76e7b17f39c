"""Several processes that train one model together: each has a store of its own, and they agree.

`join` is the way in.  Nothing else of the library knows that there are others; with one process nothing
of this package is imported.
"""

from tierstore.training.ranks.averaging import GradientAverages
from tierstore.training.ranks.joining import Ranks, join

__all__ = ["GradientAverages", "Ranks", "join"]
