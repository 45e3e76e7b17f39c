"""``recompute_config`` and ``swap_config`` in the YAML file that ``offload_config`` is in.

Where layers lie is read as well, from where the reference's files say it: ``pipeline_stage`` under
``parallel_config``, ``pp_interleave_num`` and ``offset`` under ``model: model_config``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath

from tierstore.config import document
from tierstore.config.checks import Faults
from tierstore.errors import ConfigError
from tierstore.training.activations.config.recompute_config import RecomputeConfig
from tierstore.training.activations.config.swap_config import SwapConfig

RECOMPUTE = "recompute_config"
SWAP = "swap_config"
SECTIONS = (SWAP, RECOMPUTE, "offload_config", "context")
"""What makes a mapping a document: the sections that are read."""
_LAYOUT = {
    "pipeline_stage": ("parallel_config",),
    "pp_interleave_num": ("model", "model_config"),
    "offset": ("model", "model_config"),
}


@dataclass(frozen=True, slots=True)
class Sections:
    """What a document says about activations.

    Attributes:
        recompute: its ``recompute_config``; ``None``: there is none.
        swap: its ``swap_config``; ``None``: there is none.
        layout: those of ``pipeline_stage``, ``pp_interleave_num`` and ``offset`` that it gives, unchecked:
            arguments of `plan_layers`, which checks them.
    """

    recompute: RecomputeConfig | None = None
    swap: SwapConfig | None = None
    layout: Mapping[str, object] = field(default_factory=dict, hash=False)


def read_sections(path: str | PurePath) -> Sections:
    """Read a YAML file.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or has faults, which are listed.
    """
    return _sections(document.load(Path(path)), str(path))


def sections_of(mapping: Mapping[str, object]) -> Sections:
    """Read a mapping that has the sections as keys; other keys are left alone.

    Raises:
        ConfigError: lists every fault.
    """
    return _sections(mapping, "the mapping")


def section_values(given: object) -> dict[str, object]:
    """Return what a document says of activations and of where layers lie, as it says it."""
    owners = (SWAP, RECOMPUTE, *(path[0] for path in _LAYOUT.values()))
    found = given if isinstance(given, Mapping) else {}
    return {key: found[key] for key in dict.fromkeys(owners) if key in found}


def _sections(given: object, where: str) -> Sections:
    found = given if isinstance(given, Mapping) else {}
    if not isinstance(given, Mapping) and given is not None:
        faults = Faults(where)
        faults.add("the document", given, "accepted: a mapping of sections")
        faults.raise_if_any()
    wrong: list[str] = []
    swap = recompute = None
    if found.get(SWAP) is not None:
        try:
            swap = SwapConfig.from_keys(found[SWAP], Faults(f"{SWAP} in {where}"))
        except ConfigError as fault:
            wrong.append(str(fault))
    if found.get(RECOMPUTE) is not None:
        try:
            faults = Faults(f"{RECOMPUTE} in {where}")
            recompute = RecomputeConfig.from_keys(found[RECOMPUTE], faults, swap=_is_on(found, swap))
        except ConfigError as fault:
            wrong.append(str(fault))
    if wrong:
        raise ConfigError("\n".join(wrong))
    return Sections(recompute, swap, _layout(found))


def _is_on(found: Mapping[str, object], swap: SwapConfig | None) -> bool:
    """Say whether swap is on, also where something else about it is wrong."""
    given = found.get(SWAP)
    return swap.swap if swap is not None else isinstance(given, Mapping) and given.get("swap") is True


def _layout(found: Mapping[str, object]) -> dict[str, object]:
    """Return where layers lie, as far as the document says it."""
    layout: dict[str, object] = {}
    for key, sections in _LAYOUT.items():
        inner: object = found
        for section in sections:
            inner = inner.get(section) if isinstance(inner, Mapping) else None
        if isinstance(inner, Mapping) and inner.get(key) is not None:
            layout[key] = inner[key]
    return layout
