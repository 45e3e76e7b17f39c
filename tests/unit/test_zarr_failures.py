"""What a store's exceptions mean, each as its library really raises it."""

from __future__ import annotations

import errno

import aiohttp
import botocore.exceptions  # type: ignore[import-untyped]
import obstore.exceptions
import pytest

from tierstore.errors import BackendError, IntegrityError
from tierstore_backends.zarr.failures import explain, is_transient


def client_error(status: int) -> Exception:
    """Return what botocore makes of an answer."""
    response = {"Error": {"Code": str(status)}, "ResponseMetadata": {"HTTPStatusCode": status}}
    error: Exception = botocore.exceptions.ClientError(response, "PutObject")
    return error


def answer(status: int) -> str:
    """Return what obstore makes of an answer."""
    said = f"Server returned non-2xx status code: {status} X: "
    return f"Generic S3 error: Error performing PUT http://h:5/b in 7ms - {said}"


def caused(by: BaseException) -> Exception:
    """Return what s3fs makes of an error of botocore: an ``OSError`` with the cause attached."""
    error = OSError(errno.EIO, "An error occurred")
    error.__cause__ = by
    return error


class HttpError(Exception):
    """As gcsfs and others have it."""

    def __init__(self, code: object) -> None:
        super().__init__("it failed")
        self.code = code


NOW = [
    TimeoutError(),
    ConnectionResetError("peer"),
    OSError(errno.ETIMEDOUT, "late"),
    OSError(errno.EBUSY, "SlowDown, as s3fs has it"),
    botocore.exceptions.EndpointConnectionError(endpoint_url="http://h"),
    botocore.exceptions.ReadTimeoutError(endpoint_url="http://h"),
    botocore.exceptions.ConnectTimeoutError(endpoint_url="http://h"),
    botocore.exceptions.ConnectionClosedError(endpoint_url="http://h"),
    aiohttp.ServerDisconnectedError(),
    aiohttp.ClientPayloadError("broke off"),
    client_error(503),
    client_error(500),
    client_error(429),
    caused(client_error(503)),
    caused(TimeoutError()),
    HttpError(502),
    obstore.exceptions.GenericError(answer(500)),
    obstore.exceptions.GenericError(answer(429)),
    obstore.exceptions.GenericError(
        "Generic S3 error: Error performing GET - HTTP error: error sending request"
    ),
]
NEVER = [
    ValueError("no"),
    OSError(errno.ENOSPC, "full"),
    PermissionError(errno.EACCES, "no"),
    FileNotFoundError(errno.ENOENT, "no such bucket"),
    client_error(403),
    client_error(501),
    caused(client_error(400)),
    HttpError(404),
    HttpError("503"),
    HttpError(code=True),
    botocore.exceptions.NoCredentialsError(),
    obstore.exceptions.PermissionDeniedError(answer(403)),
    obstore.exceptions.GenericError(answer(501)),
    obstore.exceptions.GenericError("Generic S3 error: invalid header\n\nDebug source: timed out"),
    type("ReadTimeoutError", (Exception,), {})(),  # a stranger of the same name
]


@pytest.mark.parametrize("error", NOW, ids=repr)
def test_what_may_pass_is_transient(error: BaseException) -> None:
    assert is_transient(error)
    explained = explain(error, "writing")
    assert isinstance(explained, BackendError)
    assert explained.transient
    assert explained.__cause__ is error


@pytest.mark.parametrize("error", NEVER, ids=repr)
def test_what_will_not_pass_is_not(error: BaseException) -> None:
    assert not is_transient(error)
    explained = explain(error, "writing")
    assert isinstance(explained, BackendError)
    assert not explained.transient


def test_a_cause_that_was_suppressed_does_not_count() -> None:
    error = ValueError("no")
    error.__context__ = TimeoutError()
    assert is_transient(error)
    error.__suppress_context__ = True
    assert not is_transient(error)


def test_causes_in_a_circle_end() -> None:
    first, second = ValueError("no"), ValueError("no")
    first.__cause__, second.__cause__ = second, first
    assert not is_transient(first)


def test_a_text_of_pages_becomes_a_line() -> None:
    explained = explain(ValueError("x" * 5000 + "\nmore"), "writing chunk 3 of array 7 in s3://b")
    assert str(explained).startswith("writing chunk 3 of array 7 in s3://b failed: ValueError: xxx")
    assert len(str(explained)) < 400
    assert "more" not in str(explained)


def test_an_error_of_ours_stays_what_it_is() -> None:
    error = IntegrityError("different")
    assert explain(error, "reading") is error
