"""A trainer class of a trainer class, whose models are offloaded from where they are.

What is prepared by accelerate stays where it is, as does the model when the Trainer is made: both would move
it to the device as a whole.  Inputs are moved by the Trainer itself.
"""

from __future__ import annotations

import contextlib
import copy
from typing import Any, TypeVar, Unpack, cast

import torch
from torch import nn
from transformers import PreTrainedModel, Trainer

from tierstore import CapacityError, UsageError
from tierstore.integrations.transformers.callback import TierstoreCallback, refuse_arguments
from tierstore.integrations.transformers.runs import TrainerOptions
from tierstore.training.given import Config

AnyTrainerT = TypeVar("AnyTrainerT", bound=Trainer)

_REFERENCE = "ref_model"  # the model that TRL's trainers compare with
_WRAPS_ITSELF = (
    "The Trainer puts the model into DistributedDataParallel by itself: raise max_device_memory, start fewer "
    "processes, or write the loop yourself, with run.average_gradients()."
)


def offloading(
    trainer: type[AnyTrainerT], config: Config = None, **options: Unpack[TrainerOptions]
) -> type[AnyTrainerT]:
    """Return a trainer class whose models are offloaded.

    ``Trainer = offloading(Trainer, "run.yaml")``.  It takes what ``trainer`` takes, and nothing else.  The
    model stays where it is until ``train()``, which takes it into the tiers before anything is moved to the
    device, and closes the run on every way out.  ``evaluate()`` and ``predict()`` are offloaded as well.  A
    reference model (``ref_model``, as TRL's trainers have it) is in the same tiers, within the same quotas.

    Its instances have a `TierstoreCallback` as ``tierstore``.

    Args:
        trainer: ``transformers.Trainer``, or a class made of it.
        config: an `OffloadConfig`, a mapping of its keys, or a document, as `offload` takes it.
        options: see `TierstoreCallback`.

    Raises:
        UsageError: it is no such class, or is offloading already.
        ConfigError: the configuration is wrong.
        TypeError: `offload` takes no such option.
    """
    given: object = trainer
    if not (isinstance(given, type) and issubclass(given, Trainer)):
        what = given.__name__ if isinstance(given, type) else type(given).__name__
        raise UsageError(
            f"offloading({what}, ...): the first argument is a class, transformers.Trainer or one made of "
            "it. For a Trainer that is there already: trainer.add_callback(TierstoreCallback(config))."
        )
    if issubclass(trainer, _OffloadingTrainer):
        raise UsageError(f"{trainer.__name__} is offloading already: leave the second offloading(...) out.")
    return _made_of(trainer, TierstoreCallback(config, **options))


def _made_of(trainer: type[AnyTrainerT], pattern: TierstoreCallback) -> type[AnyTrainerT]:
    names = {
        "__doc__": trainer.__doc__,
        "__module__": trainer.__module__,
        "_made_from": (trainer, pattern),
    }
    return cast("type[AnyTrainerT]", type(trainer.__name__, (_OffloadingTrainer, trainer), names))


def _unmade(trainer: type[Trainer], pattern: TierstoreCallback) -> Trainer:
    """Return an instance that has nothing yet, for `pickle`."""
    kind = _made_of(trainer, pattern)
    return kind.__new__(kind)


class _OffloadingTrainer(Trainer):
    """What `offloading` adds to a trainer: only ever a base beside one.

    Attributes:
        tierstore: what has the run.
    """

    _made_from: tuple[type[Trainer], TierstoreCallback]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.tierstore = copy.copy(self._made_from[1])
        self._trains = False
        super().__init__(*args, **kwargs)
        refuse_arguments(self.args)
        self.add_callback(self.tierstore)

    def __reduce__(self) -> tuple[object, ...]:
        """Return how `pickle` makes it anew: its class has no name that could be imported."""
        return _unmade, self._made_from, vars(self)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """See `Trainer.train`.  On every way out the run is closed, unless it does not fit into memory."""
        self._trains = True
        try:
            with self.tierstore:
                return super().train(*args, **kwargs)
        except CapacityError as error:
            if "DistributedDataParallel" in str(error):
                error.add_note(_WRAPS_ITSELF)
            raise
        finally:
            self._trains = False

    def create_accelerator_and_postprocess(self) -> None:
        """See `Trainer`.  What is prepared stays where it is; inputs are moved by the Trainer itself."""
        super().create_accelerator_and_postprocess()
        self.accelerator.device_placement = False
        if self.accelerator.ddp_handler is not None:  # the same bits, and gradients are there once, not twice
            self.accelerator.ddp_handler.gradient_as_bucket_view = True

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """See `Trainer.create_optimizer`.  In training what it trains is offloaded then."""
        optimizer: torch.optim.Optimizer = super().create_optimizer(*args, **kwargs)
        if self._trains:
            self._begin(goes_on=self.state.global_step > 0)
        return optimizer

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """See `Trainer.training_step`.  To `auto_find_batch_size` one that does not fit is out of memory.

        Raises:
            torch.OutOfMemoryError: it does not fit, and a smaller one will be tried.
            CapacityError: it does not fit.
        """
        try:
            loss: torch.Tensor = super().training_step(*args, **kwargs)
        except CapacityError as error:
            if self.args.auto_find_batch_size and self._train_batch_size > 1:
                raise torch.OutOfMemoryError(f"The tiers are out of memory. {error}") from error
            raise
        return loss

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """See `Trainer.evaluation_loop`.  Outside of training it has a run of its own."""
        with self.tierstore.evaluating(self._models()):
            return super().evaluation_loop(*args, **kwargs)

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        if self._trains and self.tierstore.has_weights:  # before what the files have would be taken for them
            super().create_optimizer()
            self._begin(goes_on=True)
        super()._load_from_checkpoint(*args, **kwargs)

    def _load_best_model(self, *args: Any, **kwargs: Any) -> Any:
        with self._late_state_dicts():
            return super()._load_best_model(*args, **kwargs)

    def _save(self, *args: Any, **kwargs: Any) -> None:
        with self._late_state_dicts():
            super()._save(*args, **kwargs)

    def _late_state_dicts(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which a model is saved, or asked what it has, with little of it in memory.

        transformers writes a shard at a time; PEFT makes a state dict of the whole model to save, or to load,
        adapters, and looks at the entries of these alone.
        """
        run, model = self.tierstore.run, self.model
        is_whole, is_of_peft = isinstance(model, PreTrainedModel), hasattr(model, "peft_config")
        if run is None or not (is_whole or is_of_peft):
            return contextlib.nullcontext()
        return run.late_state_dicts("meta" if is_whole else "cpu")

    def _move_model_to_device(self, *args: Any, **kwargs: Any) -> None:
        """Leave it where it is."""

    def _begin(self, *, goes_on: bool) -> None:
        self.tierstore.begin(self._models(), self.optimizer, self.state, goes_on=goes_on)

    def _models(self) -> tuple[nn.Module, ...]:
        """Return the model, and the one that it is compared with if that is another."""
        model = cast("nn.Module", self.model)  # which is there from __init__ on
        reference: object = getattr(self, _REFERENCE, None)
        if isinstance(reference, nn.Module) and reference not in set(model.modules()):
            return model, reference
        return (model,)
