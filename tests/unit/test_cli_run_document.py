"""The YAML of a planned run: read back it says the same, to the last mark."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.cli.run_document import quota_keys, run_document, size_text, to_yaml
from tierstore.config import OffloadConfig
from tierstore.errors import UsageError
from tierstore.planning import (
    BundleHomes,
    ComputeFigures,
    Home,
    LinkFigures,
    Machine,
    PlacedMark,
    Placement,
    Stashing,
    TierFigures,
    TierMedium,
    Treatment,
)
from tierstore.training.activations import read_sections
from tierstore.training.placing import marks_in
from tierstore.units import GIB, parse_bytes

_LAYERS = 6
_MEDIA = {"device": TierMedium.DEVICE, "host": TierMedium.HOST, "disk": TierMedium.STORAGE}


def _machine(**capacities: int) -> Machine:
    names = list(capacities)
    links = [
        LinkFigures(a, b, 1e9)
        for upper, lower in itertools.pairwise(names)
        for a, b in ((upper, lower), (lower, upper))
    ]
    tiers = [
        TierFigures(name, nbytes, _MEDIA.get(name, TierMedium.HOST)) for name, nbytes in capacities.items()
    ]
    figures = ComputeFigures({"float32": 1e12}, 1e9)
    return Machine("a machine", tuple(tiers), tuple(links), figures, figures)


_USUAL = _machine(device=3 * GIB, host=5 * GIB + 1, disk=7 * GIB)


def _read(text: str, tmp_path: Path) -> tuple[OffloadConfig, Path]:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return OffloadConfig.from_yaml(path), path


def test_quotas_and_keys_that_were_given_come_back(tmp_path: Path) -> None:
    settings = OffloadConfig(
        hbm_ratio=0.9, offload_path=["/a", "/b"], device="emulated", max_device_memory="1MB"
    )
    placement = Placement({"bundle": BundleHomes()}, Stashing.WITHOUT_ROOM, {"device": 0.25}, frozenset())
    read, _ = _read(to_yaml(run_document(settings, _USUAL, placement), []), tmp_path)
    assert read.max_device_bytes == 3 * GIB
    assert read.offload_cpu_size == 5 * GIB + 1
    assert parse_bytes(read.offload_disk_size or 0) == 7 * GIB
    assert (read.hbm_ratio, read.device, read.offload_path) == (0.9, "emulated", ("/a", "/b"))
    assert Placement.from_mapping(read.placement) == placement


@pytest.mark.parametrize(
    ("capacities", "says"),
    [
        ({"device": GIB, "host": GIB}, {"offload_disk_size": 0}),
        ({"host": GIB}, {"device": "cpu", "offload_disk_size": 0}),
        ({"host": GIB, "disk": GIB}, {"device": "cpu", "offload_disk_size": "1GB"}),
    ],
)
def test_tiers_that_a_machine_lacks_are_said_to_be_none(
    capacities: dict[str, int], says: dict[str, object]
) -> None:
    keys = run_document(OffloadConfig(), _machine(**capacities), Placement())["offload_config"]
    assert isinstance(keys, dict)
    assert {key: keys[key] for key in says} == says
    assert ("max_device_memory" in keys) == ("device" in capacities)


def test_a_tier_that_no_configuration_knows_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="tape"):
        quota_keys(_machine(host=1, tape=1))


_WHOLE = st.sampled_from([Treatment.SWAP, Treatment.RECOMPUTE])


@st.composite
def _markings(draw: st.DrawFn) -> list[PlacedMark]:
    """Mark layers as a whole, and operators of those that are not."""
    marks = []
    for layer in draw(st.sets(st.integers(0, _LAYERS - 1))):
        treatment = draw(_WHOLE)
        operators = draw(st.sampled_from(["", "attention", r"mlp\.up"]))
        ahead = draw(st.integers(1, 9)) if treatment is Treatment.SWAP else 0
        marks.append(PlacedMark(layer, operators, treatment, ahead))
    return sorted(marks, key=lambda mark: mark.layer)


@given(_markings())
def test_marks_come_back_as_the_sections_of_a_run(
    tmp_path_factory: pytest.TempPathFactory, marks: list[PlacedMark]
) -> None:
    document = run_document(OffloadConfig(), _USUAL, Placement(marks=marks))
    path = tmp_path_factory.mktemp("run") / "run.yaml"
    path.write_text(to_yaml(document, []))
    assert list(marks_in(read_sections(path), _LAYERS)) == marks
    assert OffloadConfig.from_yaml(path).is_on


def test_sections_that_were_given_are_kept_as_they_are() -> None:
    marks = [PlacedMark(2, "norm", Treatment.KEEP)]
    sections: dict[str, object] = {
        "recompute_config": {"recompute": True, "select_recompute_exclude": ["norm"]}
    }
    document = run_document(OffloadConfig(), _USUAL, Placement(marks=marks), sections)
    assert {key: document[key] for key in sections} == sections


def test_a_mark_that_no_section_can_say_is_refused() -> None:
    with pytest.raises(UsageError, match="layer 2 norm: keep"):
        run_document(OffloadConfig(), _USUAL, Placement(marks=[PlacedMark(2, "norm", Treatment.KEEP)]))


@given(st.integers(0, 2**50))
def test_sizes_are_exact(nbytes: int) -> None:
    assert parse_bytes(size_text(nbytes)) == nbytes
    assert parse_bytes(size_text(nbytes * GIB)) == nbytes * GIB


def test_remarks_are_comments_whatever_is_in_them(tmp_path: Path) -> None:
    remarks = ["one\ntwo: [", "word " * 60, ""]
    text = to_yaml(run_document(OffloadConfig(device="emulated"), _USUAL, Placement()), remarks)
    read, _ = _read(text, tmp_path)
    assert read.device == "emulated"
    lines = text.splitlines()
    assert lines[0] == "# one two: ["
    assert max(map(len, lines)) <= 112


def test_homes_of_a_bundle_come_back(tmp_path: Path) -> None:
    homes = BundleHomes(Home("host"), Home("host", "cpu"), Home("disk", "cpu"))
    text = to_yaml(run_document(OffloadConfig(), _USUAL, Placement({"a": homes, "b": homes})), [])
    read, _ = _read(text, tmp_path)
    assert Placement.from_mapping(read.placement).bundles == {"a": homes, "b": homes}
