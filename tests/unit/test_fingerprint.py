"""Programs of one model have one fingerprint, and those of another have another one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tierstore.planning.fingerprints import fingerprint
from tierstore.planning.program import ByteKind

_TENSORS = st.lists(
    st.tuples(
        st.text(max_size=3),
        st.integers(0, 12),
        st.sampled_from([ByteKind.PARAMETERS, ByteKind.BUFFER]),
    ),
    max_size=4,
)


@given(_TENSORS, _TENSORS)
def test_fingerprints_are_equal_just_where_the_tensors_are(
    one: list[tuple[str, int, ByteKind]], other: list[tuple[str, int, ByteKind]]
) -> None:
    def in_order(tensors: list[tuple[str, int, ByteKind]]) -> list[tuple[str, int, str]]:
        return sorted((name, nbytes, kind.value) for name, nbytes, kind in tensors)

    are_equal = in_order(one) == in_order(other)
    assert (fingerprint(one) == fingerprint(other)) is are_equal


def test_a_fingerprint_stays_what_it_was_in_files_that_were_written() -> None:
    tensors = [("weight", 16, ByteKind.PARAMETERS), ("running_mean", 8, ByteKind.BUFFER)]
    assert fingerprint(tensors) == fingerprint(reversed(tensors)) == "06b1c462b0c99bae1e8524809f92e906"
