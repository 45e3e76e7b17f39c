"""Checkpoints of `TierstoreStrategy` are Lightning's own, whoever makes them and goes on from them."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

pytest.importorskip("lightning")

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins import TorchCheckpointIO

from tests.integrations.lightning_models import Classifier, How, copied, data, options_of, ours, trainer
from tests.sampling import too_long_for_ci
from tests.training.twins import assert_equal_models, blocks, every_layout
from tierstore.errors import UsageError

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"
    ),  # its advice
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
    pytest.mark.filterwarnings("ignore:.*`isinstance.treespec, LeafSpec.` is deprecated"),
]


def keeper(path: Path, **options: Any) -> ModelCheckpoint:
    usual = {"monitor": "val_loss", "save_top_k": 2, "save_last": True, "filename": "{epoch}"}
    return ModelCheckpoint(path, **{**usual, **options})


def trained(
    path: Path,
    strategy: pl.strategies.Strategy | None = None,
    *,
    epochs: int = 2,
    how: How | None = None,
    **options: Any,
) -> Classifier:
    """Train a module that begins with the same values each time."""
    ckpt_path = options.pop("ckpt_path", None)
    torch.manual_seed(0)
    model = Classifier(how or How(scheduler="cosine"))
    torch.manual_seed(1)
    kept = keeper(path, **options.pop("kept", {}))
    made = trainer(
        path, strategy, max_epochs=epochs, enable_checkpointing=True,
        callbacks=[kept, *options.pop("callbacks", [])],
        **options_of(model.how), **options,
    )  # fmt: skip
    made.fit(model, data(), data(4), ckpt_path=ckpt_path)
    return model


def assert_equal_contents(expected: Any, found: Any, where: str = "") -> None:
    if isinstance(expected, Tensor):
        assert isinstance(found, Tensor)
        assert type(found) is type(expected), where
        assert (found.dtype, found.stride(), found.requires_grad) == (
            expected.dtype, expected.stride(), expected.requires_grad,
        ), where  # fmt: skip
        assert torch.equal(expected, found), where
    elif isinstance(expected, dict):
        assert type(expected) is type(found), where
        assert list(expected) == list(found), where
        for key, value in expected.items():
            if key not in (
                "dirpath",
                "best_model_path",
                "last_model_path",
                "kth_best_model_path",
                "best_k_models",
            ):
                assert_equal_contents(value, found[key], f"{where}/{key}")
    elif isinstance(expected, list | tuple):
        assert len(expected) == len(found), where
        for number, (one, other) in enumerate(zip(expected, found, strict=True)):
            assert_equal_contents(one, other, f"{where}/{number}")
    else:
        assert expected == found, where


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(path, weights_only=True)
    return found


@every_layout
def test_the_files_hold_what_lightning_s_own_hold(layout: str, tmp_path: Path) -> None:
    trained(tmp_path / "plain")
    trained(tmp_path / "ours", ours(layout, tmp_path))
    names = sorted(each.name for each in (tmp_path / "plain").glob("*.ckpt"))
    assert names == sorted(each.name for each in (tmp_path / "ours").glob("*.ckpt"))
    assert "last.ckpt" in names
    for name in names:
        assert_equal_contents(
            read(tmp_path / "plain" / name)["state_dict"], read(tmp_path / "ours" / name)["state_dict"]
        )
        expected, found = read(tmp_path / "plain" / name), read(tmp_path / "ours" / name)
        assert_equal_contents(dict(expected), dict(found))


class SeedsBatches(Callback):
    """Lets each batch draw the same random numbers, whatever came before."""

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: object) -> None:
        torch.manual_seed(trainer.fit_loop.total_batch_idx)


@pytest.mark.parametrize(
    ("first", "second", "optimizer"),
    [("plain", "three", "AdamW"), ("three", "plain", "Adagrad"), ("disk", "three", "AdamW")],
)
def test_training_that_goes_on_has_the_bits_of_training_that_was_not_cut(
    first: str, second: str, optimizer: str, tmp_path: Path
) -> None:
    def on(name: str, layout: str, **options: Any) -> Classifier:
        strategy = None if layout == "plain" else ours(layout, tmp_path)
        how = How(optimizer=optimizer, scheduler="cosine", accumulated=2)
        return trained(tmp_path / name, strategy, callbacks=[SeedsBatches()], how=how, **options)

    whole = on("whole", "plain", epochs=3)
    on("cut", first, epochs=1)
    again = on("on", second, epochs=3, ckpt_path=tmp_path / "cut" / "last.ckpt")
    assert whole.losses[4:] == again.losses
    assert_equal_models(whole, again)


def test_the_best_model_is_tested_and_read_without_us(tmp_path: Path) -> None:
    results = []
    for name, strategy in (("plain", None), ("ours", ours("disk", tmp_path))):
        torch.manual_seed(0)
        model = Classifier()
        torch.manual_seed(1)
        kept = keeper(tmp_path / name, save_top_k=1)
        made = trainer(tmp_path, strategy, enable_checkpointing=True, callbacks=[kept], max_epochs=3)
        made.fit(model, data(), data(4))
        tested = made.test(model, data(5), ckpt_path="best", verbose=False)
        results.append((tested, Path(kept.best_model_path).name))
        best = Classifier.load_from_checkpoint(kept.best_model_path)
        assert_equal_models(best, model)
    assert results[0] == results[1]


class Asks(Callback):
    """Keeps copies of the parameters when a checkpoint is made, and adds to it."""

    def __init__(self, **added: Any) -> None:
        self.added = added
        self.kept: list[dict[str, Any]] = []

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self.kept.append(copied(dict(checkpoint["state_dict"])))
        checkpoint["sums"] = {
            name: float(value.numpy().sum()) for name, value in checkpoint["state_dict"].items()
        }
        checkpoint["halves"] = {name: value.half() for name, value in checkpoint["state_dict"].items()}
        checkpoint.update(self.added)


def test_callbacks_may_use_what_goes_into_a_checkpoint_and_add_to_it(tmp_path: Path) -> None:
    asks = Asks(notes=["a", torch.arange(3)], module_weight=nn.Parameter(torch.ones(2)))
    trained(tmp_path / "ours", ours("three", tmp_path), callbacks=[asks], epochs=1)
    found = read(tmp_path / "ours" / "last.ckpt")
    assert_equal_contents(asks.kept[-1], dict(found["state_dict"]))
    assert_equal_contents({name: each.half() for name, each in asks.kept[-1].items()}, found["halves"])
    assert torch.equal(found["notes"][1], torch.arange(3))
    assert type(found["module_weight"]) is nn.Parameter


def test_what_only_torch_save_writes_is_written_as_a_whole(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asks = Asks(sparse=torch.eye(3).to_sparse())
    with caplog.at_level(logging.WARNING, "tierstore"):
        trained(tmp_path / "ours", ours("three", tmp_path), callbacks=[asks], epochs=1)
    assert "is written as a whole" in caplog.text
    found = read(tmp_path / "ours" / "last.ckpt")
    assert torch.equal(found["sparse"].to_dense(), torch.eye(3))
    assert_equal_contents(asks.kept[-1], dict(found["state_dict"]))


class OwnFiles(TorchCheckpointIO):
    """Files of somebody's own."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        assert {type(each) for each in checkpoint["state_dict"].values()} <= {Tensor} | set(
            Tensor.__subclasses__()
        )
        super().save_checkpoint(checkpoint, path, storage_options)


def test_somebody_s_own_way_of_files_is_used(tmp_path: Path) -> None:
    trained(tmp_path / "plain", epochs=1)
    trained(tmp_path / "ours", ours("three", tmp_path), epochs=1, plugins=[OwnFiles()])
    assert_equal_contents(
        dict(read(tmp_path / "plain" / "last.ckpt")["state_dict"]),
        dict(read(tmp_path / "ours" / "last.ckpt")["state_dict"]),
    )


def test_a_failed_write_leaves_the_former_checkpoint(tmp_path: Path) -> None:
    trained(tmp_path, ours("three", tmp_path), epochs=1)
    former = (tmp_path / "last.ckpt").read_bytes()
    with pytest.raises(Exception, match="pickle"):
        trained(tmp_path, ours("three", tmp_path), epochs=1, callbacks=[Asks(wrong=lambda: 0)])
    assert (tmp_path / "last.ckpt").read_bytes() == former
    assert not list(tmp_path.glob(".*"))


# ---------------------------------------------------------------------- models without values


class MadeLater(Classifier):
    """Makes its body when the Trainer says so, as large models do."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential()

    def configure_model(self) -> None:
        """Make the body, once."""
        if not len(self.body):
            self.body = blocks(2)


def test_a_model_that_is_made_by_the_trainer_gets_its_weights_from_files(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = Classifier()
    save_file(plain.state_dict(), tmp_path / "weights.safetensors")
    later = MadeLater()
    for model in (plain, later):
        for seed in (1, 2):  # the second time not from the files again
            strategy = ours("three", tmp_path, weights=tmp_path / "weights.safetensors")
            torch.manual_seed(seed)
            trainer(tmp_path, None if model is plain else strategy, max_epochs=1).fit(model, data())
    assert plain.losses == later.losses
    assert_equal_models(plain, later)


def test_a_model_without_values_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    torch.manual_seed(0)
    save_file(Classifier().state_dict(), tmp_path / "weights.safetensors")
    plain = trained(tmp_path / "kept", epochs=1)
    expected = trainer(tmp_path).test(plain, data(5), verbose=False)
    later = MadeLater()
    strategy = ours("three", tmp_path, weights=tmp_path / "weights.safetensors")
    made = trainer(tmp_path, strategy, enable_checkpointing=True, callbacks=[keeper(tmp_path / "kept")])
    found = made.test(later, data(5), ckpt_path=tmp_path / "kept" / "last.ckpt", verbose=False)
    assert expected == found


def test_a_model_without_values_and_without_files_is_refused(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = Classifier()
    with pytest.raises(UsageError, match="weights="):
        trainer(tmp_path, ours("three", tmp_path)).fit(model, data())


# ---------------------------------------------------------------------- memory


@too_long_for_ci
def test_a_checkpoint_of_several_times_the_memory_is_written_and_read(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.integrations.lightning_victim", str(tmp_path)],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "model.ckpt").stat().st_size > 3 * 40 * 1024**2
