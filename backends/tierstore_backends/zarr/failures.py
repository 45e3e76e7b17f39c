"""What a store's exceptions mean: one typed error that says where, and whether to try again.

Stores are foreign: fsspec file systems, botocore, aiohttp, gcsfs, obstore and plain ``OSError`` each speak in
their own way, and none of them need be installed.  So an exception is judged by what it carries: an errno,
an HTTP status, the names of its classes.  In doubt it is not transient.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator

from tierstore.errors import TRANSIENT_ERRNOS, BackendError, TierStoreError

# EREMOTEIO is what s3fs makes of 500; not every system knows it.
_ERRNOS = TRANSIENT_ERRNOS | {getattr(errno, "EREMOTEIO", errno.ETIMEDOUT)}
_NAMES = frozenset(
    {
        "ClientConnectionError",  # aiohttp
        "ClientPayloadError",  # aiohttp: the answer broke off
        "ConnectionError",  # botocore has one of this name that is not the built-in
        "HTTPClientError",  # botocore: among them read time-outs
        "ReadTimeoutError",
        "ResponseStreamingError",
    }
)
_FOR_GOOD = frozenset({501, 505})  # of the 5xx: what the server will never do
_FOR_NOW = frozenset({408, 425, 429})  # of the 4xx: too slow, too early, too often
# obstore has no fields: one class for all, and a text.
_OBSTORE_STATUS = re.compile(r"status(?: code)?:? (?P<status>[0-9]{3})\b|\b(?P<plain>5[0-9]{2}) [A-Z]")
_OBSTORE_CONNECTION = re.compile(
    r"error sending request|timed out|timeout|connection|error decoding response body"
)
_DEEPEST = 8
_LONGEST_TEXT = 300


def explain(error: BaseException, what: str) -> TierStoreError:
    """Return ``error`` as a `BackendError` that says ``what`` failed; one of ours as it is."""
    if isinstance(error, TierStoreError):
        return error
    explained = BackendError(f"{what} failed: {brief(error)}", transient=is_transient(error))
    explained.__cause__ = error
    return explained


def forget_frames(error: BaseException) -> BaseException:
    """Return ``error`` and its causes without tracebacks, whose frames refer to the bytes on their way."""
    for each in list(_chain(error)):
        each.__traceback__ = None
    return error


def brief(error: BaseException) -> str:
    """Return the first line of an error's text with its type: some stores print pages."""
    text = str(error).strip().split("\n")[0]
    if len(text) > _LONGEST_TEXT:
        text = text[:_LONGEST_TEXT] + "..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def is_transient(error: BaseException) -> bool:
    """Whether the same call may succeed when tried again."""
    return any(_says_again(each) for each in _chain(error))


def _chain(error: BaseException) -> Iterator[BaseException]:
    each: BaseException | None = error
    for _ in range(_DEEPEST):
        if each is None:
            return
        yield each
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)


def _says_again(error: BaseException) -> bool:
    if isinstance(error, TimeoutError | ConnectionError):
        return True
    if isinstance(error, OSError) and error.errno in _ERRNOS:
        return True
    if _is_foreign(error) and any(kind.__name__ in _NAMES for kind in type(error).__mro__):
        return True
    if type(error).__module__.startswith("obstore"):
        return _obstore_says_again(str(error))
    return _status_says_again(_status(error))


def _is_foreign(error: BaseException) -> bool:
    return type(error).__module__.split(".")[0] in {"aiohttp", "aiobotocore", "botocore", "urllib3"}


def _status(error: BaseException) -> int | None:
    """Return the HTTP status that an exception carries: as botocore has it, or as a field."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    else:
        status = getattr(error, "status", None) or getattr(error, "code", None)
    return status if isinstance(status, int) and not isinstance(status, bool) else None


def _status_says_again(status: int | None) -> bool:
    return status is not None and (status in _FOR_NOW or (500 <= status < 600 and status not in _FOR_GOOD))


def _obstore_says_again(text: str) -> bool:
    headline = text.split("Debug source", maxsplit=1)[0].lower()
    found = _OBSTORE_STATUS.search(headline)
    if found is not None:
        return _status_says_again(int(found["status"] or found["plain"]))
    return _OBSTORE_CONNECTION.search(headline) is not None
