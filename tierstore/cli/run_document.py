"""The YAML of a run that was planned: what `tierstore.training.offload` reads and obeys.

1. Quotas are written out, also those that were the machine's: what was predicted is what runs.
2. Of the other keys those are written that are not the defaults.
3. Marks of activations become ``swap_config`` and ``recompute_config``: they decide these in a run.

Pure: values in, text out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import yaml

from tierstore.config import OffloadConfig
from tierstore.errors import UsageError
from tierstore.planning import Machine, PlacedMark, Placement, TierMedium, Treatment
from tierstore.quoting import listed, named
from tierstore.units import GIB, KIB, MIB, TIB

_QUOTAS = {"device": "max_device_memory", "host": "offload_cpu_size", "disk": "offload_disk_size"}
_HOST = "host"
_UNITS = (("TB", TIB), ("GB", GIB), ("MB", MIB), ("KB", KIB))
_COMMENT_CHARS = 110

Document = dict[str, object]
"""Sections by name, plain values in them."""


def to_yaml(document: Mapping[str, object], remarks: Sequence[str]) -> str:
    """Return a document as text, with remarks as comments before it."""
    comments = [f"# {line}\n" for remark in remarks for line in _folded(remark)]
    text: str = yaml.safe_dump(dict(document), sort_keys=False, allow_unicode=True, width=_COMMENT_CHARS)
    return "".join([*comments, text])


def run_document(
    settings: OffloadConfig,
    machine: Machine,
    placement: Placement,
    sections: Mapping[str, object] | None = None,
) -> Document:
    """Return the document of a run.

    Args:
        settings: that were given; its quotas and placement are replaced.
        machine: with the capacities that the run may have.
        placement: that the run is to have.
        sections: that say what happens to activations; ``None``: they are made of the placement's marks.

    Raises:
        UsageError: the machine's tiers are none that a configuration knows, or something that happens to
            activations cannot be written as sections.
    """
    return {
        "offload_config": {
            **_beyond_defaults(settings),
            **_quotas(machine),
            **_computing(settings, machine),
            "placement": _placement(placement),
        },
        **(_sections(placement.marks) if sections is None else sections),
    }


def quota_keys(machine: Machine) -> dict[str, str]:
    """Return the key of a configuration that gives each tier's quota, by tier.

    Raises:
        UsageError: a tier is none that a configuration knows, or there is no host memory, through which all
            copies of a run go.
    """
    names = [tier.name for tier in machine.tiers]
    unknown = [name for name in names if name not in _QUOTAS]
    if unknown:
        raise UsageError(
            f"a run has the tiers {', '.join(_QUOTAS)}; the machine {named(machine.name)} has "
            f"{listed(unknown, show=named)}, which no configuration can name"
        )
    if _HOST not in names:
        raise UsageError(
            f"every copy of a run goes through host memory, and the machine {named(machine.name)} has none "
            "(tiers: host): no run can be configured so"
        )
    return {name: _QUOTAS[name] for name in names}


def size_text(nbytes: int) -> int | str:
    """Return bytes as a configuration has them: with a unit where that is exact."""
    for unit, factor in _UNITS:
        if nbytes and not nbytes % factor:
            return f"{nbytes // factor}{unit}"
    return nbytes


def _beyond_defaults(settings: OffloadConfig) -> Document:
    usual = OffloadConfig().to_mapping()
    left_out = (*_QUOTAS.values(), "placement")
    return {
        key: value
        for key, value in settings.to_mapping().items()
        if value != usual[key] and key not in left_out
    }


def _quotas(machine: Machine) -> Document:
    found = {key: size_text(machine.tier(name).capacity_bytes) for name, key in quota_keys(machine).items()}
    return {**found, **({} if _QUOTAS["disk"] in found else {_QUOTAS["disk"]: 0})}


def _computing(settings: OffloadConfig, machine: Machine) -> Document:
    """Say that there is no device where there is none: left out, it is the accelerator."""
    has_device = machine.tiers[0].medium is TierMedium.DEVICE
    return {} if has_device or settings.device is not None else {"device": "cpu"}


def _placement(placement: Placement) -> Document:
    """Return plain values of what a run does not decide by itself."""
    found = placement.to_mapping()
    del found["marks"]
    return {key: value for key, value in found.items() if value is not None and value != {}}


# ------------------------------------------------------------------------------------ activations


def _sections(marks: Sequence[PlacedMark]) -> Document:
    """Return ``swap_config`` and ``recompute_config``; nothing where nothing is marked.

    With swap on, ``recompute_config`` names layers by their numbers: so it is on even if nothing is swapped.
    """
    kept = [mark for mark in marks if mark.treatment is Treatment.KEEP]
    if kept:
        raise UsageError(f"cannot be written as sections of a configuration: {listed(kept, show=str)}")
    if not marks:
        return {}
    swapped = [mark for mark in marks if mark.treatment is Treatment.SWAP]
    again = [mark for mark in marks if mark.treatment is Treatment.RECOMPUTE]
    return {
        "swap_config": {
            "swap": True,
            "layer_swap": list(_swaps([mark for mark in swapped if not mark.operators])),
            "op_swap": list(_swaps([mark for mark in swapped if mark.operators])),
        },
        "recompute_config": {
            "recompute": _layers([mark for mark in again if not mark.operators]),
            **_selected([mark for mark in again if mark.operators]),
        },
    }


def _swaps(marks: Sequence[PlacedMark]) -> Iterator[Document]:
    """Yield entries of ``layer_swap`` or ``op_swap``: layers that are alike in one."""
    alike: dict[tuple[str, int], list[PlacedMark]] = {}
    for mark in marks:
        alike.setdefault((mark.operators, max(1, mark.ahead)), []).append(mark)
    for (operators, ahead), each in alike.items():
        name = {"op_name": operators} if operators else {}
        yield {**name, "layers": _layers(each), "backward_prefetch": ahead}


def _selected(marks: Sequence[PlacedMark]) -> Document:
    patterns = dict.fromkeys(mark.operators for mark in marks)
    if not patterns:
        return {}
    selected = {text: _layers([mark for mark in marks if mark.operators == text]) for text in patterns}
    return {"select_recompute": selected}


def _layers(marks: Sequence[PlacedMark]) -> list[int]:
    return sorted({mark.layer for mark in marks})


def _folded(remark: str) -> Iterator[str]:
    """Yield the words of a remark in lines that are short enough to read."""
    line = ""
    for word in remark.split():
        if line and len(line) + len(word) >= _COMMENT_CHARS - 2:
            yield line
            line = "  " + word
        else:
            line = f"{line} {word}" if line else word
    yield line
