"""Trainings that go on: from the Trainer's checkpoints, beside durable tiers, and from files of weights."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.integrations import tiny
from tierstore.errors import ConfigError, UsageError

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

_SAVING = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6}


def _stopping(step: int) -> Any:
    """Return a callback that ends a training."""
    from transformers import TrainerCallback

    class Stopping(TrainerCallback):
        """Ends it."""

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            """End it after a step."""
            control.should_training_stop = state.global_step == step

    return Stopping()


def _trainer(config: Any, how: str, path: Path, model: nn.Module | None = None, **options: Any) -> Any:
    return tiny.makers(config, how, **options)(
        model=tiny.model_of("gpt2") if model is None else model,
        args=tiny.arguments(path, gradient_accumulation_steps=2, **_SAVING),
        train_dataset=tiny.rows(24, 1),
    )


def _stopped(config: Any, how: str, path: Path, step: int = 4) -> None:
    trainer = _trainer(config, how, path)
    trainer.add_callback(_stopping(step))
    trainer.train()


@pytest.fixture(scope="module", name="whole")
def _whole(tmp_path_factory: pytest.TempPathFactory) -> tiny.Trained:
    """What a training leaves that was stopped and went on, without tierstore."""
    path = tmp_path_factory.mktemp("whole")
    _stopped(None, "", path)
    trainer = _trainer(None, "", path)
    trainer.train(resume_from_checkpoint=True)
    return tiny.outcome_of(trainer, path)


@pytest.mark.parametrize(
    ("first", "then"), [each for each in itertools.product(["", "callback", "class"], repeat=2) if any(each)]
)
@pytest.mark.parametrize("durable", [False, True])
def test_a_training_goes_on_from_the_trainers_checkpoint(
    first: str, then: str, durable: bool, whole: tiny.Trained, tmp_path: Path
) -> None:
    config = tiny.config_of("three", tmp_path, durable=durable)
    _stopped(config if first else None, first, tmp_path)
    trainer = _trainer(config if then else None, then, tmp_path)
    trainer.train(resume_from_checkpoint=True)
    assert tiny.differences(whole, tiny.outcome_of(trainer, tmp_path)) == []


@pytest.mark.parametrize("how", ["callback", "class"])
def test_beside_a_checkpoint_of_the_tiers_a_training_does_not_begin_unasked(how: str, tmp_path: Path) -> None:
    config = tiny.config_of("disk", tmp_path, durable=True)
    _stopped(config, how, tmp_path)
    trainer = _trainer(config, how, tmp_path)
    before = [each.clone() for each in trainer.model.parameters()]
    with pytest.raises(
        UsageError,
        match=r"of step 4, and the Trainer begins at step 0.*resume_from_checkpoint=True.*resume=False",
    ):
        trainer.train()
    assert all(torch.equal(*each) for each in zip(before, trainer.model.parameters(), strict=True))
    trainer = _trainer(config, how, tmp_path, resume=False)
    trainer.train()
    assert trainer.state.global_step == 6


def test_the_tiers_hold_what_the_trainers_checkpoint_does(tmp_path: Path) -> None:
    from tierstore.training import offload

    config = tiny.config_of("three", tmp_path, durable=True)
    _stopped(config, "class", tmp_path)
    trainer = _trainer(None, "", tmp_path)
    trainer.train(resume_from_checkpoint=str(tmp_path / "output" / "checkpoint-4"))
    shutil.rmtree(tmp_path / "output" / "checkpoint-6")
    other = _trainer(None, "", tmp_path)
    optimizer = other.create_optimizer()
    other._load_from_checkpoint(str(tmp_path / "output" / "checkpoint-4"))
    expected = {name: each.clone() for name, each in other.model.state_dict().items()}
    for parameter in other.model.parameters():
        parameter.data.zero_()
    with offload(other.model, optimizer, config) as run:
        assert run.resumed is not None
        assert run.resumed.extra == {"global_step": 4}
    found = other.model.state_dict()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []


# ---------------------------------------------------------------------- weights from files


@pytest.mark.parametrize("resumes", [False, True])
def test_weights_go_straight_into_the_tiers_and_a_checkpoint_counts_more(
    resumes: bool, tmp_path: Path
) -> None:
    tiny.model_of("llama").save_pretrained(tmp_path / "model")  # type: ignore[operator]  # of transformers
    weights = tmp_path / "model" / "model.safetensors"
    config = tiny.config_of("three", tmp_path)

    plain = _trainer(None, "", tmp_path / "plain", tiny.model_of("llama"))
    if resumes:
        plain.add_callback(_stopping(4))
        plain.train()
        shutil.copytree(tmp_path / "plain", tmp_path / "ours")
        plain = _trainer(None, "", tmp_path / "plain", tiny.model_of("llama"))
    plain.train(resume_from_checkpoint=resumes)
    ours = _trainer(config, "class", tmp_path / "ours", tiny.without_values(), weights=weights)
    ours.train(resume_from_checkpoint=resumes)
    found = tiny.differences(
        tiny.outcome_of(plain, tmp_path / "plain"), tiny.outcome_of(ours, tmp_path / "ours")
    )
    assert found == []


@pytest.mark.parametrize("has_weights", [False, True])
def test_a_model_is_evaluated_offloaded_before_it_is_trained(has_weights: bool, tmp_path: Path) -> None:
    expected = tiny.makers(None, "")(model=tiny.model_of("llama"), args=tiny.arguments(tmp_path))
    options: dict[str, Any] = {}
    model = tiny.model_of("llama")
    if has_weights:
        model.save_pretrained(tmp_path / "model")  # type: ignore[operator]  # of transformers
        options["weights"] = tmp_path / "model"
        model = tiny.without_values()
    config = tiny.config_of("device", tmp_path, durable=False)
    trainer = tiny.makers(config, "class", **options)(model=model, args=tiny.arguments(tmp_path))
    rows = tiny.rows(5, 2)
    one, other = (each.evaluate(rows)["eval_loss"] for each in (expected, trainer))
    assert one == other
    assert trainer.tierstore.run is None


def test_evaluating_leaves_durable_tiers_alone(tmp_path: Path) -> None:
    config = tiny.config_of("disk", tmp_path, durable=True)
    _stopped(config, "class", tmp_path)
    trainer = _trainer(config, "class", tmp_path)
    before = _bytes_of(tmp_path / "tiers")
    trainer.evaluate(tiny.rows(4, 2))
    assert {name: each for name, each in _bytes_of(tmp_path / "tiers").items() if name in before} == before


def _bytes_of(folder: Path) -> Mapping[str, bytes]:
    return {str(file): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_what_is_wrong_is_said_when_the_class_or_the_callback_is_made() -> None:
    from transformers import Trainer

    from tierstore.integrations.transformers import TierstoreCallback, offloading

    wrong: dict[str, Any] = {"wieghts": "model.safetensors"}
    for make in (TierstoreCallback, lambda *args, **more: offloading(Trainer, *args, **more)):
        with pytest.raises(ConfigError, match="ofload_param"):
            make({"ofload_param": "cpu"})
        with pytest.raises(TypeError, match="wieghts"):
            make({}, **wrong)
    with pytest.raises(UsageError, match=r"trainer\.add_callback\(TierstoreCallback"):
        offloading(object(), {})  # type: ignore[arg-type]  # what is refused
    with pytest.raises(UsageError, match="offloading already"):
        offloading(offloading(Trainer, {}), {})
