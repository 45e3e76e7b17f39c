"""The tree of errors: whose move it is, with fields beside the text."""

from __future__ import annotations

import pickle

import pytest

from tierstore import errors
from tierstore.errors import BackendError, CapacityError, ConfigError, KeyNotFound, TierStoreError, UsageError

_PARENTS = {
    "UsageError": TierStoreError,
    "KeyNotFound": UsageError,
    "KeyExists": UsageError,
    "LeaseError": UsageError,
    "ConfigError": UsageError,
    "NotResident": UsageError,
    "CapacityError": TierStoreError,
    "BackendError": TierStoreError,
    "IntegrityError": BackendError,
    "StoreClosed": TierStoreError,
    "StoreForked": errors.StoreClosed,
    "InvariantError": TierStoreError,
}


@pytest.mark.parametrize(("name", "parent"), _PARENTS.items())
def test_every_error_hangs_where_the_tree_says(name: str, parent: type[TierStoreError]) -> None:
    assert getattr(errors, name).__mro__[1] is parent


def test_the_tree_has_no_other_errors() -> None:
    defined = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and value.__module__ == errors.__name__
    }
    assert defined == _PARENTS.keys() | {"TierStoreError"}


def test_a_missing_key_can_be_caught_as_a_mapping_s() -> None:
    assert issubclass(KeyNotFound, KeyError)


def test_a_wrong_configuration_can_be_caught_as_a_wrong_value() -> None:
    assert issubclass(ConfigError, ValueError)


@pytest.mark.parametrize("name", [*_PARENTS, "TierStoreError"])
def test_every_error_carries_its_fields(name: str) -> None:
    error = getattr(errors, name)(
        "text", key="k", tier="host", needed_bytes=3, free_bytes=2, holders=["a", "b"]
    )
    assert (error.key, error.tier, error.needed_bytes, error.free_bytes) == ("k", "host", 3, 2)
    assert error.holders == ("a", "b")


def test_fields_that_do_not_apply_are_empty() -> None:
    error = CapacityError("text")
    assert (error.key, error.tier, error.needed_bytes, error.free_bytes, error.holders) == (
        None, None, None, None, (),
    )  # fmt: skip


def test_a_missing_key_s_message_is_printed_as_it_is() -> None:
    assert str(KeyNotFound("'k' is not in the store")) == "'k' is not in the store"


def test_an_error_without_a_message_prints_nothing() -> None:
    assert str(TierStoreError()) == ""


def test_a_backend_error_says_whether_a_retry_can_help() -> None:
    assert BackendError("text", transient=True).transient
    assert not BackendError("text").transient


@pytest.mark.parametrize("name", [*_PARENTS, "TierStoreError"])
def test_an_error_survives_a_process_boundary_with_its_fields(name: str) -> None:
    sent = getattr(errors, name)("text", key="k", needed_bytes=3, holders=["a"])
    arrived = pickle.loads(pickle.dumps(sent))
    assert type(arrived) is type(sent)
    assert (str(arrived), vars(arrived)) == ("text", vars(sent))
