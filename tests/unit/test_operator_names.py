"""What operators are called, against what PyTorch has registered."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tierstore.training.activations import Pattern
from tierstore.training.activations.config import operator_names
from tierstore.training.activations.config.operator_names import WORDS, names_of, why_idle

PAGE = Path(__file__).parents[2] / "docs/reference/swap-and-recompute-keys.md"


def _registered() -> dict[str, list[str]]:
    """Return all ATen operators with their overloads, as the dispatcher has them."""
    found: dict[str, list[str]] = {}
    for each in torch._C._dispatch_get_all_op_names():
        library, _, rest = each.partition("::")
        if library == "aten":
            found.setdefault(rest.partition(".")[0], []).append(each)
    return found


def _decomposes(overload: str) -> bool:
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    is_run = has(overload, "CPU") or has(overload, "CUDA")
    return has(overload, "CompositeImplicitAutograd") and not is_run


def _composites() -> Iterator[str]:
    """Yield the operators that autograd never sees."""
    for name, overloads in _registered().items():
        if all(_decomposes(each) or "out" in each.partition(".")[2] for each in overloads):
            yield name


def test_every_word_stands_for_operators_that_there_are() -> None:
    there_are = _registered()
    assert [(word, each) for word, names in WORDS.items() for each in names if each not in there_are] == []


def test_no_word_stands_for_itself_or_for_a_word() -> None:
    assert not [word for word, names in WORDS.items() if word in names or set(names) & set(WORDS)]


@pytest.mark.parametrize("in_place", [False, True])
def test_every_composite_operator_is_a_word_or_idle(in_place: bool) -> None:
    composites = list(_composites())
    assert {"chunk", "cosine_similarity", "linear", "scaled_dot_product_attention"} <= set(composites)
    silent = [name for name in composites if why_idle(Pattern(name), in_place=in_place) is None]
    assert [name for name in silent if name not in WORDS] == []


@pytest.mark.parametrize(
    "name", ["mul", "_softmax", "addmm", "native_dropout", "upsample_nearest2d", "where"]
)
def test_an_operator_that_runs_is_not_idle(name: str) -> None:
    for text in (name, rf"aten\.{name}", f"aten.{name}", rf"x\.{name}"):
        assert why_idle(Pattern(text), in_place=False) is None


@pytest.mark.parametrize("text", ["feed_forward", r"feed_forward\.w1", ".*", r"x\.(silu|chunk)"])
def test_what_may_mean_something_is_not_idle(text: str) -> None:
    assert why_idle(Pattern(text), in_place=False) is None


def test_an_operator_goes_by_its_own_name_and_by_the_words_for_it() -> None:
    assert names_of(torch.ops.aten.silu.default) == ("silu",)
    assert names_of(torch.ops.aten._softmax.default) == ("_softmax", "softmax")
    assert set(names_of(torch.ops.aten.addmm.default)) == {"addmm", "linear", "matmul"}


def test_a_word_has_no_overload_but_the_default_one() -> None:
    operator = torch.ops.aten.div.Tensor
    for text, is_meant in (
        ("aten.divide", True),
        ("aten.divide.default", True),
        ("aten.divide.Scalar", False),
        ("aten.div.Tensor", True),
        ("aten.div.default", False),
    ):
        assert operator_names.means_aten(Pattern(text), operator) is is_meant, text


def test_the_documentation_has_every_word() -> None:
    table = PAGE.read_text().partition("## Names of operators")[2].partition("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    shown = [word for row in rows for word in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert sorted(shown) == sorted(WORDS)
