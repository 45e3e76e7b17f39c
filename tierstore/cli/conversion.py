"""What becomes of somebody else's configuration, key by key: a document for `offload`, and a remark for each.

1. Every key that was given is remarked on, once: what it becomes, or why it becomes nothing.  Where very many
   become nothing, the last ones are only counted.
2. What is wrong is noted, and told together in the end.
3. Values are never trusted: what a remark shows of one is short and on one line.

Pure: knows no files, and nothing of DeepSpeed or Accelerate.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tierstore.config import OffloadConfig
from tierstore.config.checks import Faults
from tierstore.errors import ConfigError
from tierstore.quoting import SHOWN_CHARS, named, quoted

AUTO: Final = "auto"
"""What Hugging Face's integration fills in by itself."""

_SHOWN_CHARS = 40
_LARGEST = 1 << 62
_PATH_CHARS = 4095  # PATH_MAX of Linux, without the null byte
_MOST_NOTHINGS = 500


class Conversion:
    """A document in the making.

    Args:
        source: what the configuration is called in messages.

    Attributes:
        document: sections by name, plain values in them: what `tierstore.training.offload` takes.
        remarks: what became of each key, in the order in which they were read.
    """

    def __init__(self, source: str) -> None:
        self.document: dict[str, dict[str, object]] = {"offload_config": {}}
        self.remarks: list[str] = []
        self._source = source
        self._faults = Faults(source)
        self._nothings = 0
        """How many keys become nothing."""

    # --- what becomes of a key ----------------------------------------------------------------

    def becomes(self, key: str, value: object, **ours: object) -> None:
        """Take in what a key says.

        Args:
            key: with its sections, separated by points.
            value: that it has.
            ours: keys of ``offload_config``.
        """
        self.document["offload_config"] |= ours
        self._remark(key, value, ", ".join(f"{name}: {_shown(each)}" for name, each in ours.items()))

    def becomes_section(self, key: str, value: object, section: str, ours: Mapping[str, object]) -> None:
        """As `becomes`, of keys of another section."""
        self.document.setdefault(section, {}).update(ours)
        self._remark(key, value, f"{section}: {_shown(dict(ours))}")

    def becomes_nothing(self, key: str, value: object, why: str) -> None:
        """Say why a key has no counterpart: of so many keys one by one, of the rest how many there are."""
        if self._nothings < _MOST_NOTHINGS:
            self._remark(key, value, f"nothing: {why}")
        self._nothings += 1

    def is_read_as(self, key: str, value: object, other: str) -> None:
        """Say of a key from before which one says the same now; that is read as if it had been given."""
        self._remark(key, value, f"read as {other}")

    def is_wrong(self, key: str, value: object, accepted: str) -> None:
        """Note that a key cannot have its value."""
        self._faults.add(key, value, f"accepted: {accepted}")

    def _remark(self, key: str, value: object, what: str) -> None:
        self.remarks.append(f"{named(key)} {quoted(value, _SHOWN_CHARS)} -> {what}")

    # --- checked values -----------------------------------------------------------------------

    def is_left_out(self, key: str, value: object) -> bool:
        """Say whether a value says nothing; remark on it then."""
        if value == AUTO:
            self.becomes_nothing(key, value, "Accelerate and the Trainer fill it in; say it here")
        elif value is None:
            self.becomes_nothing(key, value, "it is empty")
        return value is None or value == AUTO

    def section(self, given: Mapping[str, object], key: str, name: str) -> dict[str, object]:
        """Return the mapping at a key; an empty one if there is none.

        Args:
            given: what has the key.
            key: in it.
            name: what messages call it.
        """
        value = given.get(key)
        if isinstance(value, Mapping):
            return {str(each): inner for each, inner in value.items()}
        if key in given and not self.is_left_out(name, value):
            self.is_wrong(name, value, "a mapping of keys to values")
        return {}

    def flag(self, key: str, value: object) -> bool:
        """Return a truth value; ``False`` if it is none."""
        if not isinstance(value, bool):
            self.is_wrong(key, value, "true or false")
        return value is True

    def count(self, key: str, value: object) -> int | None:
        """Return a whole number greater than 0; ``None`` if it is none, or left out."""
        if self.is_left_out(key, value):
            return None
        whole = int(value) if isinstance(value, float) and value.is_integer() else value
        if isinstance(whole, int) and not isinstance(whole, bool) and 0 < whole < _LARGEST:
            return whole
        self.is_wrong(key, value, "a whole number greater than 0")
        return None

    def one_of(self, key: str, value: object, accepted: Mapping[str, str | None]) -> str | None:
        """Return what stands for one of several words, in any case; ``None`` if it is left out, too."""
        if self.is_left_out(key, value):
            return None
        word = value.lower() if isinstance(value, str) and len(value) <= _SHOWN_CHARS else None
        if word is not None and word in accepted:
            return accepted[word]
        self.is_wrong(key, value, ", ".join(accepted))
        return None

    def path(self, key: str, value: object) -> str | None:
        """Return a directory's path as text; ``None`` if it is none, or left out."""
        if self.is_left_out(key, value):
            return None
        if isinstance(value, str) and value and len(value) <= _PATH_CHARS and "\0" not in value:
            try:
                value.encode()
            except UnicodeEncodeError:  # half of a pair of surrogates
                pass
            else:
                return value
        self.is_wrong(key, value, f"the path of a directory, of at most {_PATH_CHARS} characters")
        return None

    # --- the end ------------------------------------------------------------------------------

    def finished(self) -> Conversion:
        """Return it if it is right, and a run accepts it.

        Raises:
            ConfigError: lists every fault.
        """
        self._faults.raise_if_any()
        more = self._nothings - _MOST_NOTHINGS
        if more > 0:
            self.remarks.append(f"and {more} more keys -> nothing")
        try:
            OffloadConfig.from_document(self.document)
        except ConfigError as cause:
            raise ConfigError(f"{self._source}: what becomes of it cannot be: {cause}") from cause
        return self


def require_mapping(given: object, source: str) -> dict[str, object]:
    """Return a document's sections.

    Raises:
        ConfigError: it has none.
    """
    if not isinstance(given, Mapping):
        raise ConfigError(f"{source}: {quoted(given)}: accepted: a mapping of sections")
    return {str(key): value for key, value in given.items()}


def _shown(value: object) -> str:
    is_plain = isinstance(value, str) and len(value) <= SHOWN_CHARS and value.isprintable()
    return str(value) if is_plain else quoted(value)
