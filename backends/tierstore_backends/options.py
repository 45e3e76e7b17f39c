"""The options of a backend, read once when it opens.

Promises: an unknown name, a wrong type or a bad value is a `ConfigError` that names the backend
and says what is accepted.  Knows nothing of what an option does.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from tierstore.errors import ConfigError
from tierstore.units import parse_bytes


class Options:
    """What was given to one backend.

    Args:
        backend: the name that messages give it.
        given: the options as the user wrote them.
        accepted: every name the backend knows.

    Raises:
        ConfigError: a name that is not accepted.
    """

    def __init__(self, backend: str, given: Mapping[str, object], accepted: Collection[str]) -> None:
        unknown = sorted(set(given) - set(accepted))
        if unknown:
            known = ", ".join(sorted(accepted)) or "none"
            raise ConfigError(
                f"the {backend!r} backend has no option {', '.join(map(repr, unknown))}. Accepted: {known}"
            )
        self._backend = backend
        self._given = given

    def flag(self, name: str, *, default: bool) -> bool:
        """Return a truth value."""
        value = self._given.get(name, default)
        if not isinstance(value, bool):
            raise self._fault(name, value, "True or False")
        return value

    def text(self, name: str, *, default: str) -> str:
        """Return a text."""
        value = self._given.get(name, default)
        if not isinstance(value, str):
            raise self._fault(name, value, "a text")
        return value

    def number(self, name: str) -> int | None:
        """Return an int, or ``None`` if it was not given."""
        value = self._given.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise self._fault(name, value, "an int or None")
        return value

    def seconds(self, name: str, *, default: float) -> float:
        """Return a duration that is finite and not negative."""
        value = self._given.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
            raise self._fault(name, value, "seconds, 0 or more")
        return float(value)

    def nbytes(self, name: str) -> int | None:
        """Return a positive number of bytes from an int or a text; ``None`` if it was not given."""
        value = self._given.get(name)
        if value is None:
            return None
        if not isinstance(value, int | str):
            raise self._fault(name, value, "a size such as '1.5GiB', or None")
        try:
            nbytes = parse_bytes(value)
        except ConfigError as error:
            raise self._fault(name, value, "a size such as '1.5GiB', or None") from error
        if nbytes == 0:
            raise self._fault(name, value, "a size above 0, or None")
        return nbytes

    def _fault(self, name: str, value: object, accepted: str) -> ConfigError:
        return ConfigError(
            f"option {name!r} of the {self._backend!r} backend is {value!r}. Accepted: {accepted}"
        )
