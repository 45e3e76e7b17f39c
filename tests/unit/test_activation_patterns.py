"""Patterns of operators: levels, full matches, ATen names, and what equals what."""

from __future__ import annotations

import pytest
import torch

from tierstore.errors import ConfigError
from tierstore.training.activations import Pattern


@pytest.mark.parametrize(
    ("text", "levels"),
    [
        ("attention", ["attention"]),
        (r"attention\.flash_attention", ["attention", "flash_attention"]),
        (r".*\.norm", [".*", "norm"]),
        ("atten.ion", ["atten.ion"]),
        (".", ["."]),
        (r"feed_forward\.w1\.activation\.silu", ["feed_forward", "w1", "activation", "silu"]),
        (r"w\d\.(mul|add)", [r"w\d", "(mul|add)"]),
    ],
)
def test_a_backslash_and_a_point_separate_levels_and_a_point_alone_does_not(
    text: str, levels: list[str]
) -> None:
    assert [level.pattern for level in Pattern(text).levels] == levels


@pytest.mark.parametrize(
    ("text", "path", "is_meant"),
    [
        ("attention", "attention", True),
        ("attention", "attention_norm", False),
        ("norm", "attention_norm", False),
        ("attention", "attention.flash_attention", False),
        (r"attention\.flash_attention", "attention.flash_attention", True),
        (r"attention\.flash_attention", "flash_attention", False),
        (r"attention\.flash", "attention.flash_attention", False),
        (r".*\.norm", "ffn_norm.norm", True),
        (r".*\.norm", "norm", False),
        (r".*\.norm", "a.b.norm", False),
        ("atten.ion", "attention", True),
        (".", "x", True),
        (".", "xy", False),
        (r"experts\.\d+", "experts.12", True),
        ("a|ab", "ab", True),
    ],
)
def test_a_level_matches_a_name_fully_and_a_pattern_a_path_as_long(
    text: str, path: str, is_meant: bool
) -> None:
    assert Pattern(text).matches(path.split(".")) is is_meant


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "is empty"),
        (r"\.norm", "empty level"),
        (r"norm\.", "empty level"),
        (r"a\.\.b", "empty level"),
        ("(attention", "no regular expression"),
        (r"(a\.b|c)", "separated by a backslash and a point"),
        (r"a\\.b", "no regular expression"),
        ("a{99999999999999999999}", "no regular expression"),
        ("(" * 900, "no regular expression"),
    ],
)
def test_what_is_no_pattern_is_refused_by_its_text(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=r"pattern") as refusal:
        Pattern(text)
    assert why in str(refusal.value)
    assert f"'{text}'" in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "operator", "is_meant"),
    [
        (r"aten\.mm", "aten.mm.default", True),
        (r"aten\.mm", "aten.mm", True),
        (r"aten\.mm", "aten.addmm.default", False),
        (r"aten\..*mm", "aten.addmm.default", True),
        (r"aten\.add", "aten.add.Tensor", True),
        (r"aten\.add", "aten::add.Tensor", True),
        (r"aten\.add\.Scalar", "aten.add.Tensor", False),
        (r"aten\.add\..*", "aten.add.Tensor", True),
        ("aten.mm", "aten.mm.default", True),
        ("aten.mm.default", "aten.mm.default", True),
        ("aten.mm.default", "aten::mm", True),
        ("aten.mm", "aten.bmm.default", False),
        ("aten.add.Tensor", "aten.add.default", False),
        (r"aten\.mm", "prims.mm.default", False),
        (r"aten\.mm", "mm", False),
        (r"attention\.mm", "aten.mm.default", False),
        ("aten", "aten.mm.default", False),
    ],
)
def test_a_pattern_may_name_aten_operators(text: str, operator: str, is_meant: bool) -> None:
    assert Pattern(text).matches_aten(operator) is is_meant


def test_torch_s_own_names_of_operators_are_understood() -> None:
    mm = torch.ops.aten.mm
    pattern = Pattern(r"aten\.mm")
    assert pattern.matches_aten(str(mm))
    assert pattern.matches_aten(str(mm.default))
    assert pattern.matches_aten(mm.default.name())


def test_a_pattern_of_aten_operators_means_no_submodule() -> None:
    assert not Pattern(r"aten\.mm").matches(("aten", "mm"))
    assert Pattern("aten").matches(("aten",))
    assert Pattern("aten.*mm").matches(("aten_mm",))


@pytest.mark.parametrize(
    ("one", "other", "are_equal"),
    [
        (r"a\.b", r"a\.b", True),
        (r".*\.norm", r"ffn_norm\.norm", True),
        (r"ffn_norm\..*", r".*\.norm", True),
        (r"a\.b", "a", False),
        (r"a\.b", r"a\.c", False),
        (r"a\.bb", r"a\.b", False),
    ],
)
def test_patterns_are_equal_if_level_by_level_one_matches_the_other(
    one: str, other: str, are_equal: bool
) -> None:
    assert Pattern(one).equals(Pattern(other)) is are_equal
    assert Pattern(other).equals(Pattern(one)) is are_equal
