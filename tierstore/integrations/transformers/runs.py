"""The runs of one trainer: when each is opened, what it goes on with, when it ends, and what is refused.

1. There is one run at a time.  What is asked for again, of the same models and optimizers, is the one that
   is open: a training that an exception has ended goes on with it.
2. A run ends when training does, unless its bytes do not fit into memory: it stays open then, as the trained
   values would be lost otherwise, and is closed by whoever has saved them.  One that has only computed hands
   its values over to the next, through a file beside the tiers.
3. A trainer that goes on from a checkpoint of its own is right, and no checkpoint of the tiers is: training
   begins with what the trainer has loaded.  A trainer that begins anew beside a checkpoint of the tiers is
   refused: it would train a second time what is trained already.

Knows no framework.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import TypedDict

import torch
from torch import nn

from tierstore import UsageError
from tierstore.formats.safetensors_files import TensorSource
from tierstore.training import Offload, offload
from tierstore.training.activations.config.layers import Names
from tierstore.training.checkpoints.files import MODEL
from tierstore.training.checkpoints.resumed import found_in
from tierstore.training.given import Config, for_evaluation, optimizers_of, settings_of
from tierstore.training.offloadable import refuse_outgrown_state

log = logging.getLogger("tierstore")

_STEP = "global_step"  # in what a checkpoint of the tiers keeps beside the state of training


class TrainerOptions(TypedDict, total=False):
    """What `offload` takes beside the model, the optimizer and the configuration."""

    weights: str | Path | TensorSource | None
    resume: bool
    layers: Names
    ignored: Sequence[str]
    pinned: Sequence[str]
    on_close: str
    placement: Mapping[str, str] | None
    alone: bool


class TrainerRun:
    """The run of a trainer, if one is open.

    Args:
        config: as `offload` takes it.
        options: as well.

    Raises:
        ConfigError: the configuration is wrong.
        TypeError: `offload` takes no such option.
    """

    def __init__(self, config: Config, options: TrainerOptions) -> None:
        inspect.signature(offload).bind(None, None, config, **options)
        self._settings, _ = settings_of(config)
        self._config = config
        self._options = options
        self._run: Offload | None = None
        self._models: tuple[nn.Module, ...] = ()
        self._optimizers: tuple[torch.optim.Optimizer, ...] = ()
        self._training: weakref.ref[object] | None = None
        self._is_told = False  # that the run stays open

    @property
    def run(self) -> Offload | None:
        """The run that is open; ``None``: there is none."""
        if self._run is not None and self._run.is_closed:
            self._forget()
        return self._run

    @property
    def has_weights(self) -> bool:
        """Whether values come from files."""
        return self._options.get("weights") is not None

    def is_for(self, training: object) -> bool:
        """Whether the last run was opened for this training."""
        return self._training is not None and self._training() is training

    def again(self) -> TrainerRun:
        """Return one of the same configuration, without a run."""
        return TrainerRun(self._config, self._options)

    # --- beginning ------------------------------------------------------------------------------

    def open(
        self,
        models: Sequence[nn.Module],
        optimizer: torch.optim.Optimizer | None,
        training: object,
        *,
        goes_on: bool,
    ) -> None:
        """Open a run, unless the one that is there is of these.

        Args:
            models: that are offloaded, the trained one first.
            optimizer: that trains it; one that wraps another is that other.
            training: which training it is for: an object that is the same as long as it lasts.
            goes_on: whether the trainer has loaded a checkpoint of its own.

        Raises:
            UsageError: something cannot be offloaded, or would be trained twice; see `offload`.
            CapacityError: it does not fit.
        """
        _refuse_another(self, training, models)
        optimizers = optimizers_of(optimizer, models[0])
        _refuse_strangers(optimizers, models)
        refuse_outgrown_state(models, optimizers)
        self._training = weakref.ref(training)
        if self.run is not None and optimizers == self._optimizers and set(models) <= set(self._models):
            return
        options = self._options.copy()
        if self._settings.is_on and self._settings.durable and not goes_on and options.get("resume", True):
            self._refuse_to_train_twice(models, optimizers)
        if goes_on:
            options["resume"] = False
            if not any(each.is_meta for each in models[0].parameters()):
                options["weights"] = None  # the checkpoint's values are there already
        with self._taking_place(models) as handed:
            self._open(models, optimizers, self._config, {**options, **handed})

    @contextlib.contextmanager
    def evaluating(self, models: Sequence[nn.Module]) -> Iterator[None]:
        """Return a context in which models are offloaded: by the run that is open, or by one of their own.

        Nothing becomes durable in one of their own.

        Raises:
            UsageError: something cannot be offloaded; see `offload`.
            CapacityError: it does not fit.
        """
        if self.run is not None and set(models) <= set(self._models):
            yield
            return
        options = self._options.copy()
        options.pop("layers", None)
        if not any(each.is_meta for each in models[0].parameters()):
            options["weights"] = None
        with self._taking_place(models) as handed:
            self._open(models, (), for_evaluation(self._settings), {**options, **handed})
        try:
            yield
        except BaseException as error:
            self.give_up(error)
            raise
        self.end()

    def _open(
        self,
        models: Sequence[nn.Module],
        optimizers: tuple[torch.optim.Optimizer, ...],
        config: Config,
        options: TrainerOptions,
    ) -> None:
        one_or_all = models[0] if len(models) == 1 else tuple(models)
        self._is_told = False
        self._run = offload(one_or_all, optimizers, config, **options)
        self._models, self._optimizers = tuple(models), optimizers
        for model in models:
            _noted[model] = weakref.ref(self)

    @contextlib.contextmanager
    def _taking_place(self, models: Sequence[nn.Module]) -> Iterator[TrainerOptions]:
        """End the run that is there, and those that former trainers have left open on these models.

        Returns:
            a context to open the next run in, with what that has to be given.

        Raises:
            UsageError: one does not fit into memory and has trained.
        """
        handed: TrainerOptions = {}
        folder: Path | None = None
        for each in (self, *_others(self, models)):
            each.end()
            if each.run is not None:
                each._refuse_to_lose(models)  # noqa: SLF001 - another of the same class
                folder = each._hand_over()  # noqa: SLF001
                handed = {"weights": folder / "values" / MODEL}
        try:
            yield handed
        except BaseException as error:
            if folder is not None:
                error.add_note(f"The values of the model are in {str(handed['weights'])!r}.")
            raise
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)

    def _refuse_to_lose(self, models: Sequence[nn.Module]) -> None:
        """Raise if the run that is open has more than values of these models."""
        if self._optimizers or tuple(models) != self._models:
            raise UsageError(
                f"the run of a former training of this {type(models[0]).__name__} is still open, as what it "
                "has does not fit into memory. Save the model with save_model(path) of its Trainer, let go "
                "of it with close(restore=False) of its TierstoreCallback, and pass weights=path beside the "
                "configuration; or go on with that Trainer."
            )

    def _hand_over(self) -> Path:
        """Close the run; return the folder of a file with the values that it had."""
        assert self.run is not None
        given = self._settings.offload_path
        place = Path(given if isinstance(given, str | PurePath) else given[0])
        place.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix="handed-over-", dir=place))
        try:
            self.run.save(folder / "values")
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        self.close(restore=False)
        return folder

    def _refuse_to_train_twice(
        self, models: Sequence[nn.Module], optimizers: tuple[torch.optim.Optimizer, ...]
    ) -> None:
        """Raise if the durable directory holds a checkpoint, and the trainer begins at its first step."""
        former = found_in(self._settings, models[0], optimizers)
        if former is None:
            return
        step = former.extra.get(_STEP)
        raise UsageError(
            f"{str(self._settings.offload_path)!r} holds checkpoint number {former.checkpoints} of a run"
            f"{'' if step is None else f', of step {step}'}, and the Trainer begins at step 0: it would "
            "train a second time what is trained already. trainer.train(resume_from_checkpoint=True) goes on "
            "from the Trainer's own checkpoint; with resume=False, given beside the configuration, training "
            "begins anew; or give this training an offload_path of its own."
        )

    # --- on the way -----------------------------------------------------------------------------

    def checkpoint(self, step: int) -> None:
        """Make a checkpoint in the tiers, if they are durable: the trainer has just made its own.

        Args:
            step: how many the trainer has made.
        """
        if self.run is not None and self._settings.is_on and self._settings.durable and self._optimizers:
            self.run.checkpoint({_STEP: step})

    # --- the end --------------------------------------------------------------------------------

    def end(self) -> None:
        """Close the run, unless what it has does not fit into memory; see `Offload.close`."""
        if self.run is None or self._stays_open():
            return
        self.run.close()
        self._forget()

    def give_up(self, error: BaseException) -> None:
        """Close the run as `end` does, as an error is under way; what fails is a note at that."""
        if self.run is None or self._stays_open():
            return
        self.run.__exit__(type(error), error, error.__traceback__)

    def close(self, restore: bool | None = None) -> None:
        """Close the run whatever fits; see `Offload.close`.  Idempotent."""
        if self.run is not None:
            self.run.close(restore)
            self._forget()

    def _stays_open(self) -> bool:
        if self.run is None or self._options.get("on_close", "auto") != "auto":
            return False
        why = self.run.shortage()
        if why is not None and not self._is_told:
            self._is_told = True
            log.warning(
                "%s has ended, and the run stays open, as its parameters, gradients and optimizer "
                "state do not fit into memory with room to spare: %s. The model can be used and saved as it "
                "is; afterwards close(restore=False) of the callback lets go of all of it.",
                "training" if self._optimizers else "the evaluation",
                why,
            )
        return why is not None

    def _forget(self) -> None:
        self._run = None
        self._models, self._optimizers = (), ()


_noted: weakref.WeakKeyDictionary[nn.Module, weakref.ref[TrainerRun]] = weakref.WeakKeyDictionary()
"""Which trainer's run a model had last."""


def _others(run: TrainerRun, models: Sequence[nn.Module]) -> Iterator[TrainerRun]:
    """Yield what else has offloaded one of the models and is open still."""
    for model in models:
        reference = _noted.get(model)
        other = None if reference is None else reference()
        if other is not None and other is not run and other.run is not None:
            yield other


def _refuse_another(run: TrainerRun, training: object, models: Sequence[nn.Module]) -> None:
    """Raise if something else has offloaded a model for the very same training.

    Raises:
        UsageError: it says which line to take away.
    """
    if any(other.is_for(training) for other in _others(run, models)):
        raise UsageError(
            "this Trainer has two TierstoreCallbacks, or one beside offloading(...): both would offload its "
            "model. Leave one of them out: trainer.remove_callback(TierstoreCallback) takes the first away."
        )


def _refuse_strangers(optimizers: Sequence[torch.optim.Optimizer], models: Sequence[nn.Module]) -> None:
    """Raise if an optimizer trains nothing of the models, or nothing of them is to be trained.

    Raises:
        UsageError: it says what to do.
    """
    own = {each for model in models for each in model.parameters()}
    if optimizers and not any(each.requires_grad for each in own):
        raise UsageError(
            f"no parameter of the {type(models[0]).__name__} requires a gradient: there is nothing to train. "
            "Set requires_grad_(True) on those that are to be trained, or add adapters, before the optimizer "
            "is made."
        )
    for optimizer in optimizers:
        if own.isdisjoint(each for group in optimizer.param_groups for each in group["params"]):
            raise UsageError(
                f"{type(optimizer).__name__} trains no parameter of the {type(models[0]).__name__}: it was "
                "made for another model, or before this one's parameters were replaced. Make it of "
                "model.parameters() as they are now and pass Trainer(..., optimizers=(optimizer, None)), or "
                "pass none: the Trainer makes one."
            )
