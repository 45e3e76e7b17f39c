"""What a Trainer calls: when training begins, when it saves, and when training ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Self, Unpack

import torch
from accelerate.utils import parse_flag_from_env  # type: ignore[import-untyped]
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations import INTEGRATION_TO_CALLBACK  # type: ignore[attr-defined]
from transformers.trainer_callback import CallbackHandler

from tierstore import CapacityError, UsageError
from tierstore.integrations.logged import scalars
from tierstore.integrations.transformers.runs import TrainerOptions, TrainerRun
from tierstore.nn.calling import caller_of
from tierstore.training import Offload
from tierstore.training.given import Config

_REPORTERS = tuple(kind for name, kind in INTEGRATION_TO_CALLBACK.items() if name != "dvclive")
"""What takes more numbers for a step.  DVCLive counts every time that it is told as a step."""


class TierstoreCallback(TrainerCallback):
    """Offloads what a Trainer trains, from the beginning of ``train()`` to its end.

    ``trainer.add_callback(TierstoreCallback("run.yaml"))``, or ``Trainer(..., callbacks=[...])``; one for
    each Trainer.  A context manager, too: what is open when its block ends is closed.

    With ``durable`` in the configuration `Offload.checkpoint` is called whenever the Trainer saves.  Whenever
    it logs, what it reports to (``report_to``) is told where bytes and time went: see `on_log`.

    Args:
        config: an `OffloadConfig`, a mapping of its keys, or a document, as `offload` takes it.
        beside: models that are used with the trained one and share its quotas, such as DPO's reference.
        options: what `offload` takes beside that.  If ``on_close`` is not given, a run whose bytes do not
            fit into memory stays open when training ends: save the model, and `close`.

    Raises:
        ConfigError: the configuration is wrong.
        TypeError: `offload` takes no such option.
    """

    def __init__(
        self, config: Config = None, *, beside: Sequence[nn.Module] = (), **options: Unpack[TrainerOptions]
    ) -> None:
        self._runs = TrainerRun(config, options)
        self._beside = tuple(beside)
        self._logged_step: int | None = None

    @property
    def run(self) -> Offload | None:
        """The run that is open, with its statistics; ``None``: there is none."""
        return self._runs.run

    def close(self, restore: bool | None = None) -> None:
        """Close the run that is open, if there is one; see `Offload.close`.  Idempotent."""
        self._runs.close(restore)

    def __enter__(self) -> Self:
        """Return the callback itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the run that is open, unless it does not fit into memory; an exception is raised."""
        if error is None:
            self._runs.end()
        else:
            self._runs.give_up(error)

    def __getstate__(self) -> dict[str, object]:
        """Return what is pickled: the configuration, and no run.

        Raises:
            UsageError: a run is open.
        """
        if self.run is not None:
            raise UsageError(
                "a Trainer whose run is open cannot be pickled or copied: its model's bytes are in the "
                "tiers. Save the model with trainer.save_model(path), or end the run first with close() of "
                "the TierstoreCallback."
            )
        return {**vars(self), "_runs": self._runs.again()}

    # --- for trainers that know it ----------------------------------------------------------------

    @property
    def has_weights(self) -> bool:
        """Whether values come from files."""
        return self._runs.has_weights

    def begin(
        self,
        models: Sequence[nn.Module],
        optimizer: torch.optim.Optimizer | None,
        training: TrainerState,
        *,
        goes_on: bool,
    ) -> None:
        """Open the run, unless it is open for these.

        Args:
            models: that are offloaded, the trained one first.
            optimizer: that trains it; one of accelerate's is the one that it wraps.
            training: the state of this training.
            goes_on: whether the Trainer has loaded a checkpoint of its own.

        Raises:
            UsageError: something cannot be offloaded, or would not be right; the message says what to change.
            CapacityError: it does not fit.
        """
        _refuse_several_devices(models[0])
        self._runs.open(models, optimizer, training, goes_on=goes_on)

    def evaluating(self, models: Sequence[nn.Module]) -> AbstractContextManager[None]:
        """Return a context in which models are offloaded, in a run of their own if none is open for them.

        Raises:
            UsageError: layers compute on several devices.
        """
        _refuse_several_devices(models[0])
        return self._runs.evaluating(models)

    # --- what every Trainer tells -----------------------------------------------------------------

    def on_train_begin(  # type: ignore[override]  # named there as **kwargs
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        **others: object,
    ) -> None:
        """Open the run, unless the Trainer has done so (`offloading`).

        Raises:
            UsageError: something cannot be offloaded, or would not be right; the message says what to change.
            CapacityError: it does not fit.
        """
        del control, others
        self._logged_step = None
        if self.run is None:
            refuse_arguments(args)
            _refuse_several_processes(args)
        try:
            self.begin((model, *self._beside), optimizer, state, goes_on=state.global_step > 0)
        except (CapacityError, torch.OutOfMemoryError) as error:
            if next(model.parameters()).device.type not in ("cpu", "meta"):
                error.add_note(
                    "The Trainer has moved the whole model to the device before. Trainer = offloading("
                    "Trainer, config), of tierstore.integrations.transformers, leaves it where it is."
                )
            raise

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: object
    ) -> None:
        """Make a checkpoint in the tiers, if they are durable."""
        del args, control, others
        self._runs.checkpoint(state.global_step)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: object
    ) -> None:
        """Tell TensorBoard, Weights & Biases and the like what the run's metrics are, once for each step.

        Their names begin with ``tierstore/``; see `tierstore.integrations.logged.scalars`.  The Trainer's own
        logs, what it prints and what it saves have none of them: these are as without tierstore.
        """
        run, handler = self.run, caller_of(CallbackHandler)
        if run is None or handler is None or not state.is_world_process_zero:
            return
        reporters: list[Any] = [each for each in handler.callbacks if isinstance(each, _REPORTERS)]
        if reporters and state.global_step != self._logged_step:
            self._logged_step = state.global_step
            metrics = scalars(run)
            for each in reporters:
                each.on_log(args, state, control, model=others.get("model"), logs=dict(metrics))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: object
    ) -> None:
        """Close the run, unless what it has does not fit into memory."""
        del args, state, control, others
        self._runs.end()


# ---------------------------------------------------------------------- what is refused


def refuse_arguments(args: TrainingArguments) -> None:
    """Raise where another means moves the parameters.

    Raises:
        UsageError: it says which argument, and what to do.
    """
    for name in ("deepspeed", "fsdp"):
        variable = f"ACCELERATE_USE_{name.upper()}"  # of accelerate launch
        if getattr(args, name, None):
            where = f"TrainingArguments({name}=...)"
        elif parse_flag_from_env(variable):
            where = f"accelerate launch ({variable})"
        else:
            continue
        raise UsageError(
            f"{where} has parameters moved by {name}, and tierstore would as well. Leave {name} out, or "
            "tierstore."
        )
    if args.n_gpu > 1:
        raise UsageError(
            f"the Trainer sees {args.n_gpu} devices in one process and puts the model into DataParallel, "
            "which copies all parameters to each of them in every step. Start one process for each device "
            "with torchrun, or let it see one: CUDA_VISIBLE_DEVICES=0."
        )


def _refuse_several_devices(model: nn.Module) -> None:
    """Raise where layers compute on several devices.

    Raises:
        UsageError: it says what to do.
    """
    placed: object = getattr(model, "hf_device_map", None)
    devices = {str(each) for each in placed.values()} if isinstance(placed, Mapping) else set()
    devices -= {"cpu", "disk", "meta"}
    if len(devices) > 1:
        raise UsageError(
            f"the {type(model).__name__} was loaded with a device_map over {', '.join(sorted(devices))}: its "
            "layers would be given inputs there, and tierstore computes on one device. Load it without "
            "device_map=...: from_pretrained(path)."
        )


def _refuse_several_processes(args: TrainingArguments) -> None:
    """Raise where the Trainer has wrapped the model before any callback is called.

    Raises:
        UsageError: it says what to do.
    """
    if args.world_size > 1:
        raise UsageError(
            f"the Trainer has put the model into DistributedDataParallel over {args.world_size} processes "
            "before any callback is called. Trainer = offloading(Trainer, config) offloads it before that."
        )
