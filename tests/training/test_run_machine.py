"""What is known of a run's machine: before anything was measured there, and of links once they were used."""

from __future__ import annotations

import types
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tierstore as ts
from tierstore.planning.accelerators import accelerator
from tierstore.planning.machine import ComputeFigures, LinkFigures, Machine, TierFigures, TierMedium
from tierstore.recorded import CopyRecord
from tierstore.training.run_machine import machine_of, with_seen_rates
from tierstore.units import MIB


class _Named:
    """A store on an accelerator that is not here: what is asked of it before anything moves."""

    def __init__(self, store: ts.Store, device: torch.device) -> None:
        self.config = store.config
        self.device = device


@pytest.mark.parametrize(
    ("named", "entry"), [("NVIDIA A100-SXM4-80GB", "a100-80gb"), ("a device of nobody", None), (None, None)]
)
def test_an_accelerator_of_the_sheet_computes_as_the_sheet_says(
    named: str | None, entry: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = types.SimpleNamespace()
    if named is not None:
        module.get_device_name = lambda index: named if index == 1 else "another one"
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    config = ts.OffloadConfig(device="emulated", max_device_memory="1MB", offload_cpu_size="1MB")
    store_config = ts.StoreConfig.default(
        "emulated", max_device_memory="1MB", offload_cpu_size="1MB", offload_path=str(tmp_path)
    )
    with ts.Store(store_config) as store:
        found = machine_of(_Named(store, torch.device("cuda", 1)), config)  # type: ignore[arg-type]
        emulated = machine_of(store, config)
    assert emulated.sources["device"] == "assumed"
    assert found.sources["host"] == "assumed"
    if entry is None:
        assert found.sources["device"] == "assumed"
        assert found.device == emulated.device
    else:
        assert found.device == accelerator(entry).device
        assert found.sources["device"].startswith("nominal: NVIDIA A100")


_MACHINE = Machine(
    "one",
    (
        TierFigures("device", MIB, TierMedium.DEVICE, 512),
        TierFigures("host", MIB, TierMedium.HOST, 1),
    ),
    (LinkFigures("device", "host", 1e9), LinkFigures("host", "device", 1e9)),
    ComputeFigures({"float32": 1e12}, 1e10),
    ComputeFigures({"float32": 1e12}, 1e10),
)


def _seen(sizes: list[int], paces: list[float], waits: list[bool], held_up: dict[int, float]) -> float:
    """Return the rate that is seen of copies one after another, some of which wait for the one before.

    Args:
        sizes: bytes of each.
        paces: seconds of a byte of each.
        waits: whether each was ordered with the one before it.
        held_up: seconds for which the process did nothing in the midst of a copy, by its number.
    """
    copies: list[CopyRecord] = []
    now_s = begin_s = 0.0
    for number, (nbytes, pace, is_ordered) in enumerate(zip(sizes, paces, waits, strict=True)):
        if not is_ordered:
            begin_s = now_s = now_s + 0.001
        now_s += nbytes * pace + held_up.get(number, 0.0)
        copies.append(CopyRecord("key", nbytes, "device", "host", begin_s, now_s, is_whole=True))
    (link, other) = with_seen_rates(_MACHINE, copies).links
    assert other.bytes_per_s == 1e9
    return link.bytes_per_s


_PACE = 1 / 100e6


@given(
    st.lists(
        st.tuples(st.integers(64_000, 4_000_000), st.floats(0.7, 1.4), st.booleans()),
        min_size=24,
        max_size=80,
    ),
    st.integers(0, 23),
    st.floats(0.05, 5.0),
)
def test_what_holds_the_process_up_once_hardly_changes_the_rate_of_a_link(
    copies: list[tuple[int, float, bool]], number: int, seconds: float
) -> None:
    sizes, paces, waits = zip(*copies, strict=True)
    given_paces = [_PACE * each for each in paces]
    undisturbed = _seen(list(sizes), given_paces, list(waits), {})
    whole_s = sum(nbytes * pace for nbytes, pace in zip(sizes, given_paces, strict=True))
    assert undisturbed == pytest.approx(sum(sizes) / whole_s, rel=0.01)
    disturbed = _seen(list(sizes), given_paces, list(waits), {number: seconds})
    longest_s = MIB * 8 * _PACE  # of a stretch: one that is full but for a byte takes the largest copy, too
    assert sum(sizes) / (whole_s + 4 * longest_s) <= disturbed <= undisturbed * 1.001


def test_a_link_that_is_slow_half_of_the_time_is_as_slow_as_that() -> None:
    paces = [_PACE, 1.9 * _PACE] * 40
    assert _seen([MIB] * 80, paces, [False] * 80, {}) == pytest.approx(1 / (1.45 * _PACE), rel=0.01)


def test_a_link_whose_copies_took_no_time_stays_as_it_was_told() -> None:
    assert _seen([MIB] * 4, [0.0] * 4, [False] * 4, {}) == 1e9
