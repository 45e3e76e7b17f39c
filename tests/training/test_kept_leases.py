"""Where host memory is all that there is, leases stay until somebody asks for their keys."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import tierstore as ts
from tests.training.leases import leased_bytes
from tests.training.twins import Trial, batch, blocks, build_blocks, config_of, loss_of, step
from tierstore.errors import LeaseError, TierStoreError
from tierstore.training import Offload, offload


class Leased:
    """Counts leases that the store is asked for."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.count = 0
        lease = ts.Store.lease

        def counted(store: ts.Store, *keys: str, tier: str = "device", write: bool = False) -> ts.Lease:
            self.count += 1
            return lease(store, *keys, tier=tier, write=write)

        patch.setattr(ts.Store, "lease", counted)


def _trained(layout: str, path: Path, steps: int) -> tuple[Trial, Offload]:
    torch.manual_seed(0)
    model, optimizers = build_blocks()
    run = offload(model, optimizers, config_of(layout, path))
    trial = Trial(model, optimizers)
    for _ in range(steps):
        step(trial)
    return trial, run


@pytest.mark.parametrize(("layout", "stay"), [("host", True), ("disk", False), ("device", False)])
def test_later_steps_lease_nothing_where_nothing_can_go(
    layout: str, stay: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial, run = _trained(layout, tmp_path, 3)
    leased = Leased(monkeypatch)
    with run:
        for _ in range(2):
            step(trial)
    assert (leased.count == 0) is stay


def _weight(trial: Trial) -> nn.Parameter:
    return next(iter(trial.model.parameters()))


def _key(run: Offload) -> str:
    """Return the key of the bundle of the first parameter, by which the store knows it."""
    return next(key for key in run.store if key.startswith("param/"))


def _rename_twice(store: ts.Store, key: str) -> None:
    store.rename({key: "away"})
    store.rename({"away": key})


def _read_a_part(store: ts.Store, key: str) -> torch.Tensor:
    into = torch.empty(1, 4, dtype=torch.uint8)
    with store.reader() as reader:
        reader.add(key)
        reader.read([(key, 0)], into).result()
    return into


ASKED: dict[str, Callable[[ts.Store, str], object]] = {
    "get": lambda store, key: store.get(key),
    "lease": lambda store, key: store.lease(key).release(),
    "lease for writing": lambda store, key: store.lease(key, write=True).release(),
    "fetch": lambda store, key: store.fetch(key).result(),
    "prefetch": lambda store, key: store.prefetch(key).result(),
    "evict": lambda store, key: store.evict(key).result(),
    "flush": lambda store, key: store.flush(key),
    "flush all": lambda store, key: store.flush(),
    "put": lambda store, key: store.put(key, store.get(key), replace=True),
    "rename": _rename_twice,
    "drop": lambda store, key: store.drop(key),
    "part": _read_a_part,
    "put more than there is": lambda store, key: store.put(
        "more", torch.empty(65 * 2**20, dtype=torch.uint8)
    ),
    "put more than is left": lambda store, key: store.put(
        "more", torch.empty(64 * 2**20 - 2**16, dtype=torch.uint8)
    ),
    "resize": lambda store, key: store.resize("host", "32MB"),
    "resize to less than there is": lambda store, key: store.resize("host", "1KB"),
}


def _came_of(what: str, path: Path, *, are_let_go: bool) -> tuple[str, list[torch.Tensor]]:
    """Return what a call came to after some steps, and the parameters after some more."""
    trial, run = _trained("host", path, 3)
    said = ""
    try:
        with run:
            if are_let_go:
                leased_bytes(run)
            try:
                said = repr(ASKED[what](run.store, _key(run)))
            except TierStoreError as error:
                said = f"{type(error).__name__}: {error}"
            for _ in range(2):
                step(trial)
    except TierStoreError as error:  # nobody trains what was dropped
        return f"{said}, then {type(error).__name__}: {error}", []
    return said, [each.detach().clone() for each in trial.model.parameters()]


@pytest.mark.parametrize("what", ASKED)
def test_nobody_who_asks_the_store_can_tell(what: str, tmp_path: Path) -> None:
    (kept := tmp_path / "kept").mkdir()
    (gone := tmp_path / "gone").mkdir()
    said, ours = _came_of(what, kept, are_let_go=False)
    expected, theirs = _came_of(what, gone, are_let_go=True)
    assert said == expected
    assert len(ours) == len(theirs)
    assert all(map(torch.equal, ours, theirs))


def test_what_was_asked_for_in_between_changes_no_bit(tmp_path: Path) -> None:
    expected, _ = _plain(5)
    for what in ("get", "put", "rename", "part"):
        (place := tmp_path / what).mkdir()
        _, ours = _came_of(what, place, are_let_go=False)
        assert all(map(torch.equal, expected.parameters(), ours))


def _plain(steps: int) -> tuple[nn.Module, Trial]:
    torch.manual_seed(0)
    model, optimizers = build_blocks()
    trial = Trial(model, optimizers)
    for _ in range(steps):
        step(trial)
    return model, trial


def test_what_is_written_through_the_store_is_what_the_model_computes_with(tmp_path: Path) -> None:
    trial, run = _trained("host", tmp_path, 2)
    with run:
        with run.store.lease(_key(run), write=True) as lease:
            lease.tensor.zero_()
        assert not torch.count_nonzero(_weight(trial))
    assert not torch.count_nonzero(_weight(trial))


def test_a_key_that_is_in_use_is_refused_still(tmp_path: Path) -> None:
    trial, run = _trained("host", tmp_path, 2)
    with run:
        alias = _weight(trial).detach()
        with pytest.raises(LeaseError):
            run.store.lease(_key(run), write=True)
        del alias
        gc.collect()
        run.store.lease(_key(run), write=True).release()


def test_all_leases_that_stay_end_where_somebody_asks(tmp_path: Path) -> None:
    trial, run = _trained("host", tmp_path, 2)
    with run:
        assert run.store.leased_bytes("host") > 0
        assert leased_bytes(run) == 0
        with torch.no_grad():
            trial.model(batch()[0])
        assert run.store.leased_bytes("host") > 0


def test_an_error_in_the_midst_leaves_leases_that_can_be_had(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = blocks()
    with offload(model, None, config_of("host", tmp_path)) as run:
        handle = model[1].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loss_of(model, *batch())
        handle.remove()
        assert leased_bytes(run) == 0
        loss_of(model, *batch()).backward()
