"""The keys of an offload configuration, found in a YAML file.

They may stand at the top level or under ``offload_config:``; ``context:`` is read for
``memory_offload`` and ``max_device_memory``.  Other sections are left to their owners, such as
``recompute_config`` and ``swap_config`` to `tierstore.training`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tierstore.config.checks import Faults, near
from tierstore.errors import ConfigError
from tierstore.quoting import quoted
from tierstore.regular import read_regular

_SECTION = "offload_config"
_CONTEXT = "context"
_SECTIONS = (_SECTION, "recompute_config", "swap_config")
_CONTEXT_KEYS = ("memory_offload", "max_device_memory")
_NEAR = 0.9  # "offload_confg" is a slip of "offload_config"; "model_config" is a section of another owner


def read_keys(path: Path, known: Sequence[str], faults: Faults) -> dict[str, object]:
    """Return the offload keys that the YAML file at ``path`` gives, their values unchecked.

    Notes in ``faults`` a section that is not a mapping, a key given in two places, and a key
    outside the sections that is unknown.

    Raises:
        ConfigError: the file cannot be read or is not YAML.
    """
    return keys_of(load(path), known, faults, "the file")


def keys_of(given: object, known: Sequence[str], faults: Faults, what: str) -> dict[str, object]:
    """As `read_keys`, of a document that was read already; ``what`` it is called in a message."""
    document = _mapping(given, faults, what)
    context = _mapping(document.get(_CONTEXT), faults, _CONTEXT)
    parts = [
        {key: value for key, value in document.items() if _is_ours(key, value, document, known, faults)},
        _mapping(document.get(_SECTION), faults, _SECTION),
        {key: context[key] for key in _CONTEXT_KEYS if key in context},
    ]
    keys: dict[str, object] = {}
    for part in parts:
        for key, value in part.items():
            if key in keys:
                faults.add(key, value, f"given in two places; the other says {quoted(keys[key])}")
            keys[key] = _on_or_off(key, value)
    return keys


def load(path: Path) -> object:
    """Return what the YAML file at ``path`` holds: plain values, bounded as `yaml_text` says.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or holds more than is accepted.
    """
    from tierstore.config import yaml_text  # who gives a mapping needs no YAML

    try:
        text = read_regular(path, yaml_text.MOST_BYTES).decode("utf-8")
    except OSError as cause:
        raise ConfigError(f"{path}: cannot be read: {cause.strerror}") from cause
    except UnicodeDecodeError as cause:
        raise ConfigError(f"{path}: not YAML: {cause}") from cause
    return yaml_text.parse(text, str(path))


def _mapping(value: object, faults: Faults, key: str) -> dict[str, object]:
    """Return a mapping; keys that are no texts are nobody's, and are found to be so where keys are judged."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        faults.add(key, value, "accepted: a mapping of keys to values")
        return {}
    return dict(value)


def _is_ours(
    key: object, value: object, document: Mapping[str, object], known: Sequence[str], faults: Faults
) -> bool:
    """Say whether a top-level entry is an offload key; note those that can be nobody's."""
    if isinstance(key, str) and key in known:
        return True
    if isinstance(value, Mapping | list) or value is None:
        if key not in _SECTIONS and near(key, _SECTIONS, cutoff=_NEAR):
            faults.add_unknown(key, value, _SECTIONS)
    elif not document.keys() & {*_SECTIONS, _CONTEXT}:
        faults.add_unknown(key, value, known)
    return False


def _on_or_off(key: str, value: object) -> object:
    """Undo YAML's reading of an unquoted ON as true."""
    if key == "memory_offload" and isinstance(value, bool):
        return "ON" if value else "OFF"
    return value
