"""Hugging Face's `Trainer`, and every class made of it: TRL's trainers, PEFT's models in any of them.

1. `offloading` makes a trainer class of a trainer class: the model goes into the tiers from where it is, and
   is never on the device as a whole; the run is closed on every way out of ``train()``.
2. `TierstoreCallback` is for a trainer as it is.  ``Trainer.__init__`` has moved the model to the device
   then, so it has to fit there once.  No callback is told of an exception: the run stays open after one, and
   the next ``train()`` goes on with it.
3. Losses, gradients, parameters and what the Trainer writes are those of the Trainer alone, bit for bit.
"""

from tierstore.integrations.transformers.callback import TierstoreCallback
from tierstore.integrations.transformers.trainer import offloading

__all__ = ["TierstoreCallback", "offloading"]
