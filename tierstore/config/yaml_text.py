"""A YAML text, read within bounds.

1. Everything is bounded before it is built: the bytes of the text, how deep it nests, how many values it has
   with every alias counted as what it stands for, and the digits of numbers.
2. Only plain values are read: mappings, lists, texts, ints of 64 bits, floats, truth values and null.  A date
   is a text.  Other tags are refused.
3. A key is one plain value, and given once.  An alias of what it is part of is refused.
"""

from __future__ import annotations

from typing import Any

import yaml
from yaml.events import AliasEvent, Event
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from tierstore.errors import ConfigError
from tierstore.quoting import named, quoted, shortened

MOST_BYTES = 256 * 1024
MOST_LEVELS = 64
MOST_VALUES = 20_000
MOST_DIGITS = 70
"""Of a number: enough for 64 bits in base two, with a sign and underscores."""

_MOST_BITS = 64
_MESSAGE_CHARS = 500
_PREFIX = "tag:yaml.org,2002:"
_TEXT = f"{_PREFIX}str"
_MERGE = f"{_PREFIX}merge"
_PLAIN = frozenset(f"{_PREFIX}{name}" for name in ("null", "bool", "int", "float"))
_ACCEPTED = "null, bool, int, float, str, seq and map"


def parse(text: str, name: str) -> object:
    """Return what a YAML text says.

    Args:
        text: of at most `MOST_BYTES`.
        name: what messages call it.

    Raises:
        ConfigError: it is not YAML, or more than is accepted; the message says where.
    """
    if len(text) > MOST_BYTES or len(text.encode("utf-8", "surrogatepass")) > MOST_BYTES:
        raise ConfigError(f"{name}: longer than is accepted: at most {MOST_BYTES} bytes")
    loader: Any = None
    try:
        loader = _Loader(text, name)
        document: object = loader.get_single_data()
    except (yaml.YAMLError, ValueError, OverflowError) as cause:
        if isinstance(cause, ConfigError):
            raise
        why = shortened(" ".join(str(cause).split()), _MESSAGE_CHARS)
        raise ConfigError(f"{name}: not YAML: {why}") from cause
    finally:
        if loader is not None:
            loader.dispose()
    return document


class _Loader(yaml.SafeLoader):
    """PyYAML's loader of plain values, which counts while it puts nodes together."""

    def __init__(self, text: str, name: str) -> None:
        super().__init__(text)
        self._text_name = name
        self._level = 0
        self._values = 0
        self._whole: dict[int, int] = {}
        """How many values each finished node has, by identity."""

    def compose_node(self, parent: Node | None, index: int) -> Node:
        event: Event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, AliasEvent):
            node = self._composed(parent, index)
            if id(node) not in self._whole:
                raise self._refused(event, f"*{named(event.anchor)} is part of what it stands for")
            self._count(event, self._whole[id(node)])
            return node
        before = self._values
        self._count(event, 1)
        self._level += 1
        if self._level > MOST_LEVELS:
            raise self._refused(
                event, f"nested more than {MOST_LEVELS} levels deep, which is the most accepted"
            )
        node = self._composed(parent, index)
        self._level -= 1
        self._check(node)
        self._whole[id(node)] = self._values - before
        return node

    def _composed(self, parent: Node | None, index: int) -> Node:
        node = super().compose_node(parent, index)
        assert node is not None
        return node

    def _count(self, at: Event | Node, values: int) -> None:
        self._values += values
        if self._values > MOST_VALUES:
            raise self._refused(
                at, f"more than {MOST_VALUES} values, with aliases; accepted: at most as many"
            )

    def _check(self, node: Node) -> None:
        """See to it that a node is of a kind that is read."""
        match node:
            case ScalarNode():
                self._check_scalar(node)
            case SequenceNode(tag=tag) if tag == f"{_PREFIX}seq":
                pass
            case MappingNode(tag=tag) if tag == f"{_PREFIX}map":
                self._check_keys(node)
            case _:
                raise self._refused_tag(node)

    def _check_scalar(self, node: ScalarNode) -> None:
        if node.tag in (_TEXT, _MERGE):
            return
        if node.tag not in _PLAIN:
            raise self._refused_tag(node)
        if len(node.value) > MOST_DIGITS:
            raise self._refused(
                node, f"a number of {len(node.value)} characters; accepted: at most {MOST_DIGITS}"
            )
        value = self._built(node)
        if isinstance(value, int) and value.bit_length() > _MOST_BITS:
            raise self._refused(node, f"{quoted(value)} has more than {_MOST_BITS} bits, the most accepted")

    def _built(self, node: ScalarNode) -> object:
        """Return the value of a scalar that is short."""
        try:
            value: object = self.construct_object(node)
        except (ValueError, KeyError, IndexError, OverflowError) as cause:
            kind = node.tag.removeprefix(_PREFIX)
            raise self._refused(node, f"{quoted(node.value)} is no {kind}") from cause
        return value

    def _check_keys(self, node: MappingNode) -> None:
        seen: set[object] = set()
        for key, _ in node.value:
            if not isinstance(key, ScalarNode):
                raise self._refused(key, "a key that is a list or a mapping; accepted: texts and numbers")
            if key.tag == _MERGE:
                continue
            value = key.value if key.tag == _TEXT else self._built(key)
            if value in seen:
                raise self._refused(key, f"the key {quoted(value)} is given twice in one mapping")
            seen.add(value)

    def _refused_tag(self, node: Node) -> ConfigError:
        return self._refused(node, f"the tag {quoted(node.tag)} is not read; accepted: {_ACCEPTED}")

    def _refused(self, at: Event | Node, what: str) -> ConfigError:
        mark = at.start_mark
        assert mark is not None
        return ConfigError(f"{self._text_name}: line {mark.line + 1}, column {mark.column + 1}: {what}")


def _resolvers() -> dict[str, list[tuple[str, Any]]]:
    """Return how plain scalars are told apart: what YAML takes for dates, or for a lone "=", stays text."""
    known = _PLAIN | {_MERGE}
    inherited: dict[str, list[tuple[str, Any]]] = yaml.SafeLoader.yaml_implicit_resolvers
    return {
        first: [(tag, pattern) for tag, pattern in each if tag in known] for first, each in inherited.items()
    }


_Loader.yaml_implicit_resolvers = _resolvers()
