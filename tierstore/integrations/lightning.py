"""Lightning: ``Trainer(strategy=TierstoreStrategy("run.yaml"))`` trains an ordinary module offloaded.

1. The model is never moved to the device as a whole: what it has is in the tiers from the Trainer's set-up to
   its end, and everything beside parameters and buffers (states of metrics) is where the Trainer computes.
2. Each of ``fit``, ``validate``, ``test`` and ``predict`` is one run.  It ends with the call, however that
   ends: the model is ordinary again then, or released, as ``on_close`` says.
3. Checkpoints are Lightning's own files, made by its own callbacks, and plain Lightning reads them.
4. The Trainer's loggers are told the run's metrics every ``log_every_n_steps`` steps.
5. One process on one device: others are refused when the Trainer is made.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import zipfile
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import CheckpointIO, Precision, TorchCheckpointIO
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import nn
from torch.optim import Optimizer

from tierstore import callers
from tierstore.config import OffloadConfig, document
from tierstore.errors import UsageError
from tierstore.formats.safetensors_files import TensorSource
from tierstore.integrations.logged import scalars
from tierstore.training import Offload, offload, processes, without_values
from tierstore.training.bundles.placeholders import has_no_values
from tierstore.training.given import Config, settings_of

log = logging.getLogger("tierstore")

_SMALL_BYTES = 1 << 16  # of a checkpoint's tensors: that much is not left in the file that it was read from
_COMPUTES_ON_CPU = ("cpu", "emulated")


class TierstoreStrategy(SingleDeviceStrategy):
    """Trains, validates, tests and predicts with the model in a tiered store.

    Args:
        config: as of `tierstore.training.offload`: the path of a YAML file, a mapping or an `OffloadConfig`.
            Where it names no ``device``, that is the Trainer's.
        weights: as of `tierstore.training.offload`, read as long as the model has parameters on the meta
            device.  What ``configure_model`` makes is made without values then.
        layers: as of `tierstore.training.offload`.
        ignored: likewise.
        pinned: likewise.
        on_close: likewise, of each call of the Trainer's.
        placement: likewise.
        shows_tiers: whether the Trainer's progress bar shows how full the tiers are: ``tiers/host`` is the
            share of its quota that is taken.  `Trainer.callback_metrics` has these, too; loggers are told
            the run's metrics instead.
        accelerator: as of every strategy of Lightning's.
        checkpoint_io: likewise.
        precision_plugin: likewise.

    Raises:
        ConfigError: the configuration is wrong.
        UsageError: it is durable.
    """

    strategy_name = "tierstore"

    def __init__(  # noqa: PLR0913 - each has a default, and a name
        self,
        config: Config = None,
        *,
        weights: str | Path | TensorSource | None = None,
        layers: str | Sequence[str] | None = None,
        ignored: Sequence[str] = (),
        pinned: Sequence[str] = (),
        on_close: str = "auto",
        placement: Mapping[str, str] | None = None,
        shows_tiers: bool = True,
        accelerator: Accelerator | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        super().__init__(
            "cpu", accelerator=accelerator, checkpoint_io=checkpoint_io, precision_plugin=precision_plugin
        )
        self._settings, _ = settings_of(config)
        if self._settings.durable:
            raise UsageError(
                "TierstoreStrategy: with durable=True a run would go on from a checkpoint that the Trainer "
                "knows nothing of. Leave durable out: Lightning's own checkpoints are made and resumed from, "
                "by ModelCheckpoint and trainer.fit(model, ckpt_path=...)."
            )
        self._config = config
        self._weights = weights
        self._options: dict[str, Any] = {
            "layers": layers,
            "ignored": ignored,
            "pinned": pinned,
            "on_close": on_close,
            "placement": placement,
        }
        self._shows_tiers = shows_tiers
        self._run: Offload | None = None
        self._failure: BaseException | None = None
        self._logged_step: int | None = None
        self._is_restored_late = False
        with callers.opening("TierstoreStrategy(...)"):
            self._made_by = callers.opener()

    @property
    def run(self) -> Offload:
        """The run that is open, with its statistics and its store.

        Raises:
            UsageError: none is: the Trainer is not at work.
        """
        if self._run is None:
            raise UsageError(
                "no run is open: there is one from the Trainer's set-up to its end, as in callbacks and "
                "steps."
            )
        return self._run

    # --- where it computes --------------------------------------------------------------------

    @property
    def parallel_devices(self) -> Sequence[torch.device] | None:
        """What the Trainer tells the strategy: its devices.  ``None``, for it to do so."""
        return None

    @parallel_devices.setter
    def parallel_devices(self, devices: Sequence[torch.device]) -> None:
        if len(devices) > 1:
            raise UsageError(
                f"TierstoreStrategy computes on one device, and the Trainer has {len(devices)}: write "
                "Trainer(devices=1, strategy=TierstoreStrategy(...))."
            )
        (device,) = devices
        named = self._settings.device
        kind = "cpu" if named in _COMPUTES_ON_CPU else torch.device(named or device).type
        if self._settings.is_on and kind != torch.device(device).type:
            raise UsageError(
                f"the configuration says device: {named}, and the Trainer computes on {str(device)!r}. Write "
                f"Trainer(accelerator={'cpu' if kind == 'cpu' else kind!r}, ...), or leave device out of the "
                "configuration."
            )
        self._root_device = torch.device(device)

    @property
    def num_nodes(self) -> int:
        """How many machines train: one."""
        return 1

    @num_nodes.setter
    def num_nodes(self, count: int) -> None:
        if count > 1:
            raise UsageError(
                f"TierstoreStrategy trains on one machine, and the Trainer has {count}: write "
                "Trainer(num_nodes=1, strategy=TierstoreStrategy(...))."
            )

    def setup_environment(self) -> None:
        """Refuse to be one of several processes, which nobody would average gradients for.

        Raises:
            UsageError: there are several.
        """
        if processes.are_several():
            raise UsageError(
                "TierstoreStrategy trains in one process, and this is one of several (torchrun, or a "
                "process group that is initialised): each would train a model of its own. Start it with "
                "python, without torchrun; to train in several processes write the loop yourself, with "
                "run.average_gradients()."
            )
        super().setup_environment()

    # --- the run ------------------------------------------------------------------------------

    def setup(self, trainer: Trainer) -> None:
        """Open the run: what the Trainer calls when the model is whole.

        Raises:
            UsageError, ConfigError, CapacityError: as from `tierstore.training.offload`.
        """
        assert self.accelerator is not None
        assert self.model is not None
        self._failure = self._logged_step = None
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        trains = trainer.state.fn == TrainerFn.FITTING
        if trains:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        with callers.opened_by(self._made_by):
            run = offload(
                self.model,
                self.optimizers if trains else [],  # those of a former fit stay the Trainer's: it saves them
                self._config_for_here(),
                weights=self._weights if self._lacks_values else None,
                **self._options,
            )
        self._run = run.__enter__()

    def model_to_device(self) -> None:
        """Bring there what is neither a parameter nor a buffer; the store brings those."""
        assert self.model is not None
        if not self._settings.is_on:
            super().model_to_device()
            return
        self._refuse_moved(self.model)
        self._move_the_rest(self.root_device)

    def _refuse_moved(self, model: nn.Module) -> None:
        moved = [name for name, each in model.named_parameters() if each.device.type not in ("cpu", "meta")]
        if moved and len(moved) == sum(1 for _ in model.parameters()):
            device = next(model.parameters()).device
            raise UsageError(
                f"all parameters of {type(model).__name__} are on {str(device)!r}: it was moved there as a "
                f"whole. Leave out model.to({str(device)!r}) or model.cuda(): the strategy brings what is "
                "needed, when it is."
            )

    def _move_the_rest(self, device: torch.device) -> None:
        """Move what modules keep in ways of their own, as metrics do, and what the store does not touch."""
        model = self.lightning_module
        if model is None or self.root_device.type == "cpu":
            return
        kept = {id(each) for each in (*model.parameters(), *model.buffers())}
        # A module's own way of moving: modules with states beside buffers override it.
        model._apply(lambda each: each if id(each) in kept else each.to(device))  # type: ignore[no-untyped-call]  # noqa: SLF001

    @property
    def _lacks_values(self) -> bool:
        model = self.lightning_module
        return model is not None and any(
            type(each) is nn.Parameter and each.is_meta for each in model.parameters()
        )

    def _config_for_here(self) -> Config:
        """Return the configuration, with the Trainer's device where it names none, or no number."""
        root, named = self.root_device, self._settings.device
        if not self._settings.is_on or named in _COMPUTES_ON_CPU or (named is not None and ":" in named):
            return self._config
        if isinstance(self._config, OffloadConfig):
            return OffloadConfig.from_mapping({**self._config.to_mapping(), "device": str(root)})
        given = document.load(Path(self._config)) if isinstance(self._config, str | Path) else self._config
        return _with_device(given if isinstance(given, Mapping) else {}, str(root))

    def on_exception(self, exception: BaseException) -> None:
        """Note what ends the call: the end of the run is to be no other."""
        self._failure = exception

    def teardown(self) -> None:
        """Close the run: what the Trainer calls at the end, however that came."""
        assert self.accelerator is not None
        failure, self._failure = self._failure, None
        run, self._run = self._run, None
        try:
            if run is not None:
                run.__exit__(*_triple(failure))
        finally:
            if self._settings.is_on:
                self._bring_back()
                self.precision_plugin.teardown()
                self.accelerator.teardown()
                self.checkpoint_io.teardown()
            else:
                super().teardown()

    def _bring_back(self) -> None:
        """Bring back what is on the device beside the store, also in what the model says of itself."""
        model = self.lightning_module
        if model is None or self.root_device.type == "cpu":
            return
        if any(map(has_no_values, model.parameters())):
            self._move_the_rest(torch.device("cpu"))
        else:
            model.cpu()

    @contextlib.contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """Return where ``configure_model`` makes its model: in host memory, or nowhere."""
        if not self._settings.is_on:
            with super().tensor_init_context(empty_init):
                yield
            return
        is_empty = self._weights is not None or bool(empty_init)
        place = without_values() if is_empty else contextlib.nullcontext()
        with place, torch.device("cpu"), self.precision_plugin.tensor_init_context():
            yield

    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Make a step's forward; tell the progress bar how full the tiers are, and loggers the metrics."""
        output = super().training_step(*args, **kwargs)
        module = self.lightning_module
        if self._run is not None and isinstance(module, LightningModule):
            bar = module.trainer.progress_bar_callback
            if self._shows_tiers and bar is not None and getattr(bar, "is_enabled", True):
                self._log_tiers(module, self._run)
            self._log_metrics(module.trainer, self._run)
        return output

    def _log_metrics(self, trainer: Trainer, run: Offload) -> None:
        """Tell the loggers of a step what they are told of the module's own values then, no more often."""
        step = trainer.fit_loop.epoch_loop._batches_that_stepped  # noqa: SLF001 - the number they are logged by
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]  # which its connector has set
        is_due = every > 0 and (step + 1) % every == 0
        if not (is_due and trainer.loggers) or step == self._logged_step:
            return
        self._logged_step = step
        metrics = scalars(run)
        for logger in trainer.loggers:
            logger.log_metrics(dict(metrics), step=step)

    def _log_tiers(self, module: LightningModule, run: Offload) -> None:
        for name, tier in run.stats().tiers.items():
            share = tier.charged_bytes / max(tier.capacity_bytes, 1)
            module.log(f"tiers/{name}", share, prog_bar=True, logger=False, on_step=True, on_epoch=False)

    # --- checkpoints --------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Whether a checkpoint is read into the run: where the model had no values before it.

        The Trainer asks before `setup` and after it.
        """
        if self._run is None:
            self._is_restored_late = self._lacks_values
        return self._is_restored_late

    @property
    def _streams(self) -> bool:
        """Whether checkpoints are read and written a tensor at a time: by Lightning's own way of files."""
        return self._settings.is_on and type(self.checkpoint_io) is TorchCheckpointIO

    def _late(self) -> contextlib.AbstractContextManager[None]:
        if self._run is None or not self._streams:
            return contextlib.nullcontext()
        return self._run.late_state_dicts()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the model's state for a checkpoint: entries that are read when they are written."""
        with self._late():
            return super().lightning_module_state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimizer's state likewise."""
        with self._late():
            return super().optimizer_state(optimizer)

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        filepath: str | Path,
        storage_options: Any | None = None,
    ) -> None:
        """Write a checkpoint: a local file one bundle at a time, others as Lightning does."""
        if self._run is None or not self._streams:
            super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)
            return
        if storage_options is None and "://" not in str(filepath):
            path = Path(filepath)
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                self._run.save_file(path, checkpoint)
            except (UsageError, AttributeError, TypeError, pickle.PicklingError) as error:
                log.warning("%s is written as a whole, from copies in host memory: %s", path.name, error)
            else:
                return
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint; large tensors stay in the file until they are loaded."""
        path = Path(checkpoint_path)
        if not (self._streams and path.is_file() and zipfile.is_zipfile(path)):
            return super().load_checkpoint(checkpoint_path, weights_only=weights_only)
        loaded: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)
        _take_out_small(loaded)
        return loaded

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimizers' state, which goes to the tiers."""
        if not self._settings.is_on:
            super().load_optimizer_state_dict(checkpoint)
            return
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            optimizer.load_state_dict(state)


def _with_device(given: Mapping[str, object], device: str) -> dict[str, object]:
    """Return a document or a mapping of keys, with a device."""
    section = given.get("offload_config")
    if isinstance(section, Mapping):
        return {**given, "offload_config": {**section, "device": device}}
    return {**given, "device": device}


def _triple(
    error: BaseException | None,
) -> tuple[type[BaseException] | None, BaseException | None, TracebackType | None]:
    return (None, None, None) if error is None else (type(error), error, error.__traceback__)


def _take_out_small(value: object) -> None:
    """Give the small tensors of a checkpoint memory of their own: their file may be gone by then."""
    if not isinstance(value, dict | list):
        return
    for key, each in list(value.items() if isinstance(value, dict) else enumerate(value)):
        if isinstance(each, torch.Tensor) and each.nbytes <= _SMALL_BYTES:
            value[key] = each.clone()
        else:
            _take_out_small(each)
