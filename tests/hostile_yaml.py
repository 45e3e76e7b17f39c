"""Hostile configurations, as YAML and as mappings.  None may take more than seconds, or much memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from tierstore.config.yaml_text import MOST_BYTES, MOST_LEVELS, MOST_VALUES

KEY = "checksum"


def laughs(levels: int = 12, members: int = 9) -> str:
    """Return a text of a few hundred bytes that stands for ``members ** levels`` values."""
    lines = [f"a0: &a0 [{','.join(['x'] * members)}]"]
    lines += [f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * members)}]" for n in range(1, levels)]
    return "\n".join(lines)


def laughs_of_mappings(levels: int = 12, members: int = 9) -> str:
    """Return the same of mappings that take each other in."""
    lines = ["a0: &a0 {x: 1}"]
    lines += [f"a{n}: &a{n} {{<<: [{','.join([f'*a{n - 1}'] * members)}]}}" for n in range(1, levels)]
    return "\n".join(lines)


DOCUMENTS: Mapping[str, tuple[str, str]] = {
    "laughs": (laughs(), f"more than {MOST_VALUES} values"),
    "laughs of mappings": (laughs_of_mappings(), f"more than {MOST_VALUES} values"),
    "many values": ("[" + "1," * (MOST_VALUES + 1) + "]", f"more than {MOST_VALUES} values"),
    "deep lists": ("[" * 500, f"more than {MOST_LEVELS} levels"),
    "deep mappings": ("{a: " * 500, f"more than {MOST_LEVELS} levels"),
    "deep blocks": ("- " * 5_000, f"more than {MOST_LEVELS} levels"),
    "deep keys": ("? " * 5_000, f"more than {MOST_LEVELS} levels"),
    "a list in itself": ("a: &a [*a]", "part of what it stands for"),
    "a mapping in itself": ("&a {<<: *a}", "part of what it stands for"),
    "decimal digits": (f"{KEY}: {'9' * 5_000}", "a number of 5000 characters"),
    "hexadecimal digits": (f"{KEY}: 0x{'f' * 5_000}", "a number of 5002 characters"),
    "digits in base sixty": (f"{KEY}: 1{':1' * 5_000}", "a number of 10001 characters"),
    "digits after a point": (f"{KEY}: 1.{'1' * 5_000}", "a number of 5002 characters"),
    "digits of a key": (f"{'9' * 70}: 1", "more than 64 bits"),
    "65 bits": (f"{KEY}: {2**64}", "more than 64 bits"),
    "digits of the version": (f"%YAML 1.{'9' * 5_000}\n--- {{}}", "not YAML"),
    "a key twice": (f"{KEY}: true\n{KEY}: false", f"the key '{KEY}' is given twice"),
    "a key twice in another section": ("model: {a: 1, b: 2, a: 3}", "the key 'a' is given twice"),
    "one number as a key twice": ("model: {1: a, 0x1: b}", "the key 1 is given twice"),
    "a list as a key": ("? [a]\n: 1", "a key that is a list or a mapping"),
    "a mapping as a key": ("? {a: 1}\n: 1", "a key that is a list or a mapping"),
    "an object": ("a: !!python/object/apply:os.system [x]", "the tag 'tag:yaml.org,2002:python/object"),
    "a module": ("a: !!python/name:os.system ''", "the tag 'tag:yaml.org,2002:python/name"),
    "a tag of somebody": ("a: !mine {b: 1}", "the tag '!mine' is not read"),
    "a long tag": (f"a: !{'t' * 5_000} b", "is not read; accepted: null, bool"),
    "bytes": ("a: !!binary x", "the tag 'tag:yaml.org,2002:binary'"),
    "a set": ("a: !!set {x}", "the tag 'tag:yaml.org,2002:set'"),
    "a date": ("a: !!timestamp x", "the tag 'tag:yaml.org,2002:timestamp'"),
    "no int": ("a: !!int x", "'x' is no int"),
    "an empty int": ("a: !!int ''", "'' is no int"),
    "no float": ("a: !!float x", "'x' is no float"),
    "no bool": ("a: !!bool x", "'x' is no bool"),
    "a merge of nothing": ("a: <<", "not YAML"),
    "a character beyond all": ('a: "\\UFFFFFFFF"', "not YAML"),
    "a null byte": ("a: \0", "not YAML"),
    "an anchor that is not there": ("a: *b", "not YAML"),
    "a long anchor that is not there": (f"a: *{'b' * 5_000}", "not YAML"),
    "two documents": ("a: 1\n---\nb: 1", "not YAML"),
    "too long": ("#" * (MOST_BYTES + 1), f"at most {MOST_BYTES}"),
    "a path that no file has": ('offload_path: "\\ud800"', "accepted: the path of a directory"),
    "many paths": (f"offload_path: [{'/a,' * 2_000}]", "a list of 1 to 256"),
    "many unknown keys": (
        "offload_config:\n" + "".join(f"  key{n}: 1\n" for n in range(1_000)),
        "1000 faults",
    ),
    "keys that are no texts": ("offload_config: {2: 1, true: 3, null: 4, 1.5: 6}", "4 faults"),
    "a long key": (f"offload_config:\n  ? {'k' * 5_000}\n  : 1", "unknown key"),
    "a long text": (f"{KEY}: {'x ' * 5_000}", "accepted: true or false"),
    "a ratio beyond floats": ("hbm_ratio: 1.0e+999", "hbm_ratio=inf: accepted"),
}
"""By name: a document, and what the refusal says."""

ACTIVATIONS: Mapping[str, tuple[str, str]] = {
    "many stages": (
        "{recompute_config: {recompute: true}, parallel_config: {pipeline_stage: 4000000000}}",
        "more than 65536 cells",
    ),
    "a long pattern": (
        "recompute_config: {select_recompute: [" + "a" * 5_000 + "]}",
        "accepted: at most 1000",
    ),
    "many wrong marks": (
        f"swap_config: {{swap: true, layer_swap: [{'{a: 1},' * 1_000}]}}",
        "and 992 more",
    ),
}
"""The same, for the sections that are about activations."""


def python_mappings() -> Iterator[tuple[str, Callable[[], dict[str, object]]]]:
    """Yield mappings that no YAML gives: a name, and what makes one."""
    yield "a cyclic list", lambda: {KEY: _cyclic()}
    yield "a cyclic mapping", lambda: {KEY: _cyclic_mapping()}
    yield "a deep list", lambda: {KEY: _deep()}
    yield "a huge list", lambda: {KEY: ["x" * 1000] * 10_000_000}
    yield "a huge set", lambda: {KEY: set(range(100_000))}
    yield "a huge text", lambda: {KEY: "x" * 100_000_000}
    yield "huge bytes", lambda: {KEY: b"x" * 100_000_000}
    yield "a huge int", lambda: {KEY: 10**5_000}
    yield "a huge size", lambda: {"offload_cpu_size": 10**5_000}
    yield "a huge negative size", lambda: {"offload_cpu_size": -(10**5_000)}
    yield "a huge count", lambda: {"aio_queue_depth": 10**5_000}
    yield "a huge ratio", lambda: {"hbm_ratio": 10**5_000}
    yield "an object with a hostile repr", lambda: {KEY: Hostile()}
    yield "a class of them", lambda: {KEY: Hostile}
    yield "a list of them", lambda: {"offload_path": [Hostile()]}
    yield "a text with a hostile repr", lambda: {KEY: HostileText("x")}
    yield "an int with a hostile repr", lambda: {KEY: HostileInt(5)}
    yield "a list with a hostile repr", lambda: {KEY: HostileList([1])}
    yield "a hostile key", lambda: {Hostile(): 1}  # type: ignore[dict-item]
    yield "a huge key", lambda: {"x" * 100_000_000: 1}
    yield "a number as a key", lambda: {10**5_000: 1}  # type: ignore[dict-item]
    yield "a hostile device", lambda: {"device": "cuda:" + "9" * 5_000}
    yield "a hostile engine", lambda: {"aio_engine": Hostile()}
    yield "a hostile codec", lambda: {"codec": Hostile()}
    yield "a huge codec", lambda: {"codec": "x" * 10_000_000}


class _Raising:
    def _never(self) -> str:
        raise AssertionError("code of a value runs while a message is made")

    __repr__ = __str__ = _never


class Hostile(_Raising):
    """What nobody may ask how it looks."""


class HostileText(_Raising, str):
    """A text of that kind."""


class HostileInt(_Raising, int):
    """An int of that kind."""


class HostileList(_Raising, list[int]):
    """A list of that kind."""


def _cyclic() -> list[object]:
    cyclic: list[object] = []
    cyclic.append(cyclic)
    return cyclic


def _cyclic_mapping() -> dict[str, object]:
    cyclic: dict[str, object] = {}
    cyclic["x"] = cyclic
    return cyclic


def _deep() -> list[object]:
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    return deep
