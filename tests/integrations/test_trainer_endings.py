"""However a training ends, nothing stays offloaded that need not, and the next one is right."""

from __future__ import annotations

import copy
import gc
import itertools
import logging
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.integrations import tiny
from tierstore.errors import UsageError
from tierstore.training.budgets import host_room

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

_EVENTS = (
    "on_train_begin",
    "on_epoch_begin",
    "on_step_begin",
    "on_substep_end",
    "on_pre_optimizer_step",
    "on_optimizer_step",
    "on_step_end",
    "on_evaluate",
    "on_prediction_step",
    "on_save",
    "on_log",
    "on_train_end",
)
_MOMENTS = (*_EVENTS, "data", "forward", "backward", "step")
_ERRORS: Mapping[str, type[BaseException]] = {"error": RuntimeError, "interrupt": KeyboardInterrupt}


class Fuse:
    """Raises once, the second time that its moment comes, or the first if it comes but once.

    Args:
        moment: when.
        error: what.
    """

    def __init__(self, moment: str, error: type[BaseException]) -> None:
        self._moment = moment
        self._error = error
        self._left = 1 if moment in ("on_train_begin", "on_epoch_begin", "on_train_end") else 2

    @property
    def is_burnt(self) -> bool:
        """Whether it has raised."""
        return self._left == 0

    def at(self, moment: str) -> None:
        """Raise, if it is time."""
        if moment == self._moment and self._left:
            self._left -= 1
            if self.is_burnt:
                raise self._error(moment)

    def rows(self, count: int, seed: int) -> Any:
        """Return data that passes it."""
        return _Rows(tiny.rows(count, seed), self)

    def callback(self) -> Any:
        """Return a callback that passes it at each event."""
        from transformers import TrainerCallback

        events = {name: self._event(name) for name in _EVENTS}
        return type("Passing", (TrainerCallback,), events)()

    def _event(self, name: str) -> Any:
        return lambda *_, **__: self.at(name)

    def watch(self, trainer: Any) -> None:
        """Pass it in the model and the optimizer."""
        layer = trainer.model.model.layers[0].mlp
        layer.register_forward_pre_hook(lambda *_: self.at("forward"))
        layer.register_full_backward_hook(lambda *_: self.at("backward"))
        trainer.create_optimizer().register_step_pre_hook(lambda *_: self.at("step"))


class _Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __init__(self, rows: list[dict[str, Tensor]], fuse: Fuse) -> None:
        self._rows = rows
        self._fuse = fuse

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        self._fuse.at("data")
        return self._rows[number]


def _ordinary(model: nn.Module) -> bool:
    return all(type(each) is nn.Parameter for each in model.parameters())


def _trained_twice(moment: str, error: str, how: str, config: Any, path: Path) -> tiny.Trained:
    fuse = Fuse(moment, _ERRORS[error])
    trainer = tiny.makers(config, how)(
        model=tiny.model_of("llama"),
        args=tiny.arguments(
            path,
            max_steps=2,
            gradient_accumulation_steps=2,
            eval_strategy="steps",
            eval_steps=1,
            save_strategy="steps",
            save_steps=1,
            save_total_limit=1,
        ),
        train_dataset=fuse.rows(24, 1),
        eval_dataset=fuse.rows(4, 2),
        callbacks=[fuse.callback()],
    )
    fuse.watch(trainer)
    with pytest.raises(_ERRORS[error], match=moment):
        trainer.train()
    assert fuse.is_burnt
    if how == "class":
        assert _ordinary(trainer.model)
    trainer.train()
    assert _ordinary(trainer.model)
    return tiny.outcome_of(trainer, path)


@pytest.mark.parametrize(
    ("moment", "layout", "error", "how"),
    [
        (moment, layout, *ways)
        for number, moment in enumerate(_MOMENTS)
        for layout, ways in zip(
            [*tiny.LAYOUTS][number % 2 :: 2],
            list(itertools.product(_ERRORS, ["callback", "class"]))[number % 2 :: 2][
                :: 1 - 2 * (number // 2 % 2)
            ],
            strict=True,
        )
    ],
)
def test_a_training_that_was_ended_by_an_exception_can_begin_again(
    moment: str, error: str, how: str, layout: str, tmp_path: Path
) -> None:
    plain = _trained_twice(moment, error, how, None, tmp_path / "plain")
    ours = _trained_twice(moment, error, how, tiny.config_of(layout, tmp_path), tmp_path / "ours")
    assert tiny.differences(plain, ours) == []


def test_after_an_exception_what_a_callback_has_opened_can_be_used_and_closed(tmp_path: Path) -> None:
    from transformers import Trainer

    from tierstore.integrations.transformers import TierstoreCallback

    fuse = Fuse("forward", RuntimeError)
    callback = TierstoreCallback(tiny.config_of("three", tmp_path))
    trainer: Any = Trainer(
        tiny.model_of("llama"), tiny.arguments(tmp_path), train_dataset=tiny.rows(8, 1), callbacks=[callback]
    )
    fuse.watch(trainer)
    with pytest.raises(RuntimeError, match="forward"):
        trainer.train()
    assert callback.run is not None
    trainer.save_model(str(tmp_path / "saved"))
    callback.close()
    assert _ordinary(trainer.model)
    trainer.train()


def test_the_block_of_a_callback_closes_what_it_has_opened(tmp_path: Path) -> None:
    from transformers import Trainer

    from tierstore.integrations.transformers import TierstoreCallback

    fuse = Fuse("data", KeyboardInterrupt)
    callback = TierstoreCallback(tiny.config_of("disk", tmp_path))
    trainer: Any = Trainer(
        tiny.model_of("llama"),
        tiny.arguments(tmp_path),
        train_dataset=fuse.rows(8, 1),
        callbacks=[callback],
    )
    with pytest.raises(KeyboardInterrupt), callback:
        trainer.train()
    assert callback.run is None
    assert _ordinary(trainer.model)


# ---------------------------------------------------------------------- what does not fit


@pytest.mark.parametrize("how", ["callback", "class"])
@pytest.mark.parametrize("fails", [False, True])
def test_a_run_that_does_not_fit_into_memory_stays_open_and_can_be_saved(
    how: str, fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import safetensors.torch

    fuse = Fuse("on_step_end" if fails else "never", RuntimeError)
    trainer = tiny.makers(tiny.config_of("three", tmp_path), how)(
        model=tiny.model_of("llama"),
        args=tiny.arguments(tmp_path, max_steps=2),
        train_dataset=tiny.rows(8, 1),
        callbacks=[fuse.callback()],
    )
    room = [host_room._FreeMemory("the machine", 0, 0)]
    monkeypatch.setattr(host_room, "_rooms", lambda *_: iter(room))
    with caplog.at_level(logging.WARNING, "tierstore"):
        if fails:
            with pytest.raises(RuntimeError, match="on_step_end"):
                trainer.train()
        else:
            trainer.train()
    assert not _ordinary(trainer.model)
    told = [each for each in caplog.messages if "stays open" in each]
    assert len(told) == (0 if fails and how == "callback" else 1)
    trainer.save_model(str(tmp_path / "saved"))
    saved = safetensors.torch.load_file(tmp_path / "saved" / "model.safetensors")
    trainer.train()  # goes on with the run that is open
    room[:] = [host_room._FreeMemory("the machine", 2**40, 0)]
    trainer.train()
    assert _ordinary(trainer.model)
    assert saved.keys() == trainer.model.state_dict().keys()


@pytest.mark.parametrize("layout", ["disk", "three"])
@pytest.mark.parametrize("has_weights", [False, True])
def test_a_model_that_does_not_fit_is_trained_after_it_was_evaluated(
    has_weights: bool, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trained(config: Any, path: Path) -> tiny.Trained:
        model: Any = tiny.model_of("llama" if has_weights else "tied")
        options: dict[str, Any] = {}
        if has_weights and config is not None:
            model.save_pretrained(tmp_path / "model")
            options["weights"], model = tmp_path / "model", tiny.without_values()
        trainer = tiny.makers(config, "class", **options)(
            model=model,
            args=tiny.arguments(path, max_steps=2, eval_strategy="steps", eval_steps=1),
            train_dataset=tiny.rows(8, 1),
            eval_dataset=tiny.rows(4, 2),
        )
        told = [trainer.evaluate()["eval_loss"], trainer.predict(tiny.rows(3, 3)).metrics["test_loss"]]
        with torch.no_grad():
            trainer.model.lm_head.weight.mul_(1.5)  # what was written meanwhile counts
        told.append(trainer.evaluate()["eval_loss"])
        if config is not None:
            assert not _ordinary(trainer.model)
        trainer.train()
        told.append(trainer.evaluate()["eval_loss"])
        if config is not None:
            room[:] = [host_room._FreeMemory("the machine", 2**40, 0)]
            trainer.tierstore.close()
        found = tiny.outcome_of(trainer, path)
        return tiny.Trained([{"told": told}, *found.logged], found.tensors, found.files)

    plain = trained(None, tmp_path / "plain")
    room = [host_room._FreeMemory("the machine", 0, 0)]
    monkeypatch.setattr(host_room, "_rooms", lambda *_: iter(room))
    ours = trained(tiny.config_of(layout, tmp_path), tmp_path / "ours")
    assert tiny.differences(plain, ours) == []
    assert not [*(tmp_path / "tiers").glob("handed-over-*")]


def test_where_a_training_stays_open_another_trainer_of_the_model_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_room, "_rooms", lambda *_: iter([host_room._FreeMemory("the machine", 0, 0)]))
    make = tiny.makers(tiny.config_of("three", tmp_path), "class")
    given = {"model": tiny.model_of("llama"), "train_dataset": tiny.rows(8, 1)}
    first = make(args=tiny.arguments(tmp_path, max_steps=1), **given)
    first.train()
    second = make(args=tiny.arguments(tmp_path, max_steps=1), **given)
    with pytest.raises(UsageError, match=r"save_model\(path\).*close\(restore=False\).*weights=path"):
        second.train()
    first.train()
    assert first.state.global_step == 1
    first.tierstore.close(restore=False)


# ---------------------------------------------------------------------- several of them


def test_two_callbacks_of_one_trainer_are_refused(tmp_path: Path) -> None:
    from transformers import Trainer

    from tierstore.integrations.transformers import TierstoreCallback, offloading

    config = tiny.config_of("host", tmp_path)
    for kind, count in ((Trainer, 2), (offloading(Trainer, config), 1)):
        callbacks: list[Any] = [TierstoreCallback(config) for _ in range(count)]
        model = tiny.model_of("llama")
        trainer = kind(model, tiny.arguments(tmp_path), train_dataset=tiny.rows(8, 1), callbacks=callbacks)
        with pytest.raises(UsageError, match=r"two TierstoreCallbacks.*trainer\.remove_callback"):
            trainer.train()
        trainer.remove_callback(TierstoreCallback)
        trainer.train()
        assert _ordinary(model)


@pytest.mark.parametrize(("first", "second"), [*itertools.product(["callback", "class"], repeat=2)])
def test_a_second_trainer_takes_over_the_model_of_one_that_has_failed(
    first: str, second: str, tmp_path: Path
) -> None:
    def trained(config: Any, path: Path) -> tiny.Trained:
        model = tiny.model_of("tied")
        trainers: list[Any] = []
        for how in (first, second):
            fuse = Fuse("step" if how is first and not trainers else "never", RuntimeError)
            trainer = tiny.makers(config, how)(
                model=model, args=tiny.arguments(path), train_dataset=tiny.rows(8, 1)
            )
            trainer.create_optimizer().register_step_pre_hook(lambda *_, fuse=fuse: fuse.at("step"))
            trainers.append(trainer)
            if len(trainers) == 1:
                with pytest.raises(RuntimeError, match="step"):
                    trainer.train()
            else:
                trainer.train()
        return tiny.outcome_of(trainers[-1], path)

    plain = trained(None, tmp_path / "plain")
    ours = trained(tiny.config_of("three", tmp_path), tmp_path / "ours")
    assert tiny.differences(plain, ours) == []


@pytest.mark.parametrize("how", ["callback", "class"])
def test_models_that_are_made_anew_for_each_training_are_offloaded_each(how: str, tmp_path: Path) -> None:
    def trained(config: Any, path: Path) -> tiny.Trained:
        trainer = tiny.makers(config, how)(
            model_init=lambda: tiny.model_of("llama"),
            args=tiny.arguments(path),
            train_dataset=tiny.rows(8, 1),
        )
        for _ in range(2):
            trainer.train()
        return tiny.outcome_of(trainer, path)

    plain = trained(None, tmp_path / "plain")
    ours = trained(tiny.config_of("disk", tmp_path), tmp_path / "ours")
    assert tiny.differences(plain, ours) == []


@pytest.mark.parametrize("how", ["callback", "class"])
def test_what_a_dropped_trainer_had_open_is_given_back(how: str, tmp_path: Path) -> None:
    fuse = Fuse("on_step_end", RuntimeError)
    trainer = tiny.makers(tiny.config_of("disk", tmp_path), how)(
        model=tiny.model_of("llama"),
        args=tiny.arguments(tmp_path),
        train_dataset=tiny.rows(8, 1),
        callbacks=[fuse.callback()],
    )
    with pytest.raises(RuntimeError, match="on_step_end"):
        trainer.train()
    del trainer
    gc.collect()
    assert [file for file in (tmp_path / "tiers").rglob("*") if file.is_file()] == []


# ---------------------------------------------------------------------- pickled


@pytest.mark.parametrize("how", ["callback", "class"])
def test_a_trainer_is_pickled_without_a_run_and_refused_with_one(how: str, tmp_path: Path) -> None:
    refused: list[str] = []

    from transformers import TrainerCallback

    class Pickles(TrainerCallback):
        """Tries it in the middle of the training."""

        def on_step_end(self, *_: Any, **__: Any) -> None:
            """Pickle it, and copy it."""
            given = trainer if how == "class" else trainer.callback_handler.callbacks
            for way in (pickle.dumps, copy.deepcopy):
                with pytest.raises(UsageError) as raised:
                    way(given)
                refused.append(str(raised.value))

    trainer = tiny.makers(tiny.config_of("three", tmp_path), how)(
        model=tiny.model_of("llama"),
        args=tiny.arguments(tmp_path, max_steps=1),
        train_dataset=tiny.rows(8, 1),
    )
    again = pickle.loads(pickle.dumps(trainer))
    assert type(again).__mro__[1:] == type(trainer).__mro__[1:]
    pickles = Pickles()
    trainer.add_callback(pickles)
    trainer.train()
    again.train()
    assert len(refused) == 2
    assert all("trainer.save_model(path)" in each for each in refused)
    assert all(
        torch.equal(one, other)
        for one, other in zip(trainer.model.parameters(), again.model.parameters(), strict=True)
    )
