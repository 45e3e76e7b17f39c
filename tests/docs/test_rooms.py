"""The picture of the rooms shows the imports as they are."""

from __future__ import annotations

from graphlib import CycleError
from pathlib import Path
from xml.etree import ElementTree

import pytest

from scripts import draw_rooms

_SHOWN = (
    "tierstore/training",
    "tierstore/training/activations",
    "backends/tierstore_backends/files",
)


def _packages(folder: Path) -> set[str]:
    """Return the packages directly in ``folder``, by the names that they are imported by."""
    inside = [path.parent.relative_to(draw_rooms.ROOT) for path in folder.glob("*/__init__.py")]
    return {".".join(part for part in path.parts if part != "backends") for path in inside}


def test_the_picture_is_what_the_imports_are() -> None:
    committed = draw_rooms.PICTURE.read_text(encoding="utf-8").splitlines()
    assert committed == draw_rooms.draw().splitlines(), "to make it again: python scripts/draw_rooms.py"


@pytest.mark.parametrize("folder", _SHOWN)
def test_every_package_stands_in_the_picture(folder: str) -> None:
    drawn = {element.get("id") for element in ElementTree.parse(draw_rooms.PICTURE).iter()}
    packages = _packages(draw_rooms.ROOT / folder)
    assert packages
    assert packages <= drawn


def test_an_arrow_is_left_out_where_others_lead() -> None:
    imports = {"a": {"b", "c", "d"}, "b": {"c"}, "c": {"d"}, "d": set[str]()}
    assert draw_rooms.without_detours(imports) == {"a": ["b"], "b": ["c"], "c": ["d"], "d": []}


def test_a_room_without_a_layer_stands_right_below_those_that_import_it() -> None:
    imports = {"high": {"free", "low"}, "middle": {"low"}, "free": {"low"}, "low": set[str]()}
    rows = draw_rooms.in_rows(imports, [("high",), ("middle",), ("low",)])
    assert rows == [["high"], ["free", "middle"], ["low"]]


def test_an_import_that_leads_up_is_not_drawn_but_refused() -> None:
    with pytest.raises(CycleError):
        draw_rooms.in_rows({"high": set[str](), "low": {"high"}}, [("high",), ("low",)])
