"""The YAML that pages on modes and on other libraries show: accepted, and what `tierstore convert` makes."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import yaml

from tests.docs.blocks import ROOT
from tierstore.cli import convert
from tierstore.config import OffloadConfig, document
from tierstore.planning.placement import Placement
from tierstore.training.activations import read_sections

_MODES = ROOT / "docs" / "how-to" / "choose-a-mode.md"
_OTHERS = ROOT / "docs" / "how-to" / "come-from-another-library.md"
_FENCED = re.compile(
    r"^(?P<before>[ *-]*)```(?P<kind>yaml|json)\n(?P<text>.*?)^ *```$", re.MULTILINE | re.DOTALL
)
_HEADING = re.compile(r"^## (.*)$", re.MULTILINE)


def _blocks(page: Path) -> Iterator[tuple[str, str, str]]:
    """Yield heading, kind and text of each configuration that a page shows."""
    text = page.read_text(encoding="utf-8")
    for found in _FENCED.finditer(text):
        heading = _HEADING.findall(text, 0, found.start())[-1]
        yield heading, found["kind"], textwrap.dedent(found["text"])


def _modes() -> list[tuple[str, str]]:
    return [(heading, text) for heading, _, text in _blocks(_MODES)]


def _pairs() -> list[tuple[str, str]]:
    texts = [text for _, _, text in _blocks(_OTHERS)]
    return list(zip(texts[::2], texts[1::2], strict=True))


@pytest.mark.parametrize(("heading", "text"), _modes(), ids=[heading for heading, _ in _modes()])
def test_every_file_that_the_page_on_modes_shows_is_accepted(heading: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    settings = OffloadConfig.from_yaml(path)
    read_sections(path)
    assert set(document.load(path)) <= {"offload_config", "context", "swap_config", "recompute_config"}  # type: ignore[call-overload]
    assert settings != OffloadConfig()
    if settings.placement is not None:
        assert Placement.from_mapping(settings.placement) != Placement()


def test_the_page_on_modes_has_a_file_for_each_of_them() -> None:
    found = {heading for heading, _ in _modes()}
    text = _MODES.read_text(encoding="utf-8")
    tree = text[text.index("## Where to begin") : text.index("## Nothing")]
    named = set(re.findall(r"\]\(#([a-z-]+)\)", tree))
    assert {heading.lower().replace(" ", "-") for heading in found} | {"several-processes"} == named
    assert len(_modes()) >= 13


def test_the_bytes_a_parameter_are_those_of_pytorch() -> None:
    def bytes_of(
        optimizer: Callable[..., torch.optim.Optimizer], dtype: torch.dtype, **options: float
    ) -> int:
        parameter = torch.nn.Parameter(torch.zeros(1000, dtype=dtype))
        parameter.grad = torch.zeros_like(parameter)
        trained = optimizer([parameter], lr=0.1, **options)
        trained.step()
        state = sum(
            each.nbytes
            for each in trained.state[parameter].values()
            if isinstance(each, torch.Tensor) and each.dim()
        )
        return (parameter.nbytes + parameter.grad.nbytes + state) // parameter.numel()

    row = next(
        line for line in _MODES.read_text(encoding="utf-8").splitlines() if line.startswith("| together")
    )
    shown = [int(cell) for cell in row.split("|")[2:5]]
    assert shown == [
        bytes_of(torch.optim.AdamW, torch.float32),
        bytes_of(torch.optim.AdamW, torch.bfloat16),
        bytes_of(torch.optim.SGD, torch.float32, momentum=0.9),
    ]


@pytest.mark.parametrize(("theirs", "ours"), _pairs())
def test_what_is_shown_beside_a_configuration_is_what_it_is_converted_to(theirs: str, ours: str) -> None:
    assert convert.converted(theirs, "theirs").document == yaml.safe_load(ours)


def test_the_page_on_other_libraries_shows_each_of_them() -> None:
    kinds = [kind for _, kind, _ in _blocks(_OTHERS)]
    assert kinds.count("json") >= 2
    assert len(_pairs()) >= 4


def test_a_remark_that_the_page_shows_is_one_that_is_made() -> None:
    text = _OTHERS.read_text(encoding="utf-8")
    shown = re.findall(r"^# (zero_optimization.*?)(?=^# zero|^```)", text, re.MULTILINE | re.DOTALL)
    plain = [" ".join(each.replace("\n#  ", "").split()) for each in shown]
    given = '{"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "max_in_cpu": 1e9}}}'
    assert len(plain) == 2
    assert set(plain) <= set(convert.converted(given, "given").remarks)
