"""The rules of `tierstore.spi.PartBackend`, one test each: a part of the suite that every backend passes.

They are skipped where a backend reads no parts.  See `tierstore.testing.conformance`.
"""

from __future__ import annotations

import random
from typing import cast

import pytest
import torch

from tierstore.spi import Backend, PartBackend, PartialError, Slot
from tierstore.testing.backend_operations import (
    CAPACITY_BYTES,
    contents,
    finish,
    pattern,
    refusal,
    stored,
    succeed,
)
from tierstore.units import KIB, MIB, align_up

_RUBBISH = 0x5A


class PartConformance:
    """What `BackendConformance` says of parts."""

    @pytest.fixture
    def parting(self, backend: Backend) -> PartBackend:
        """Open a backend that reads parts, where this one does."""
        if not backend.capabilities.has_parts:
            pytest.skip("this backend reads slots whole")
        return cast("PartBackend", backend)

    @staticmethod
    def _read(backend: PartBackend, slots: list[Slot], begins: list[int], nbytes: int) -> list[torch.Tensor]:
        into = torch.full((len(begins) * nbytes,), _RUBBISH, dtype=torch.uint8)
        succeed(backend.read_parts(slots, begins, nbytes, into))
        return list(into.view(-1, nbytes))

    @pytest.mark.parametrize("odd_bytes", [0, 1])
    @pytest.mark.parametrize("least_bytes", [1, 4096, 200_000, MIB + 4096])
    def test_a_part_is_what_the_whole_has_there(
        self, parting: PartBackend, least_bytes: int, odd_bytes: int
    ) -> None:
        """From its beginning to its end, also where the slot ends in the midst of a unit."""
        unit = parting.capabilities.alignment_bytes
        nbytes = align_up(least_bytes, unit)
        source = pattern(2 * nbytes + 2 * unit + odd_bytes, seed=1)
        slot = stored(parting, source)
        begins = [0, unit, nbytes, nbytes + unit, nbytes + 2 * unit]
        parts = self._read(parting, [slot] * len(begins), begins, nbytes)
        assert all(
            torch.equal(part, source[begin : begin + nbytes])
            for part, begin in zip(parts, begins, strict=True)
        )
        (whole,) = self._read(parting, [slot], [0], 2 * nbytes + 2 * unit)
        assert torch.equal(whole, source[: whole.numel()])

    def test_every_alignment_unit_can_be_read_alone(self, parting: PartBackend) -> None:
        """In any order, as many as there are, in one call."""
        unit = align_up(512, parting.capabilities.alignment_bytes)
        source = pattern(300 * unit + 7, seed=1)
        slot = stored(parting, source)
        begins = random.Random(1).sample(range(0, 300 * unit, unit), 300)
        parts = self._read(parting, [slot] * 300, begins, unit)
        assert all(
            torch.equal(part, source[begin : begin + unit]) for part, begin in zip(parts, begins, strict=True)
        )

    def test_parts_of_many_slots_may_repeat_and_overlap(self, parting: PartBackend) -> None:
        """Each comes to its own place, thousands in one call."""
        unit = align_up(4 * KIB, parting.capabilities.alignment_bytes)
        sources = [pattern(9 * unit + seed, seed) for seed in range(12)]
        slots = [stored(parting, source) for source in sources]
        chance = random.Random(2)
        chosen = [(chance.randrange(12), chance.randrange(8) * unit) for _ in range(3_000)]
        parts = self._read(parting, [slots[n] for n, _ in chosen], [begin for _, begin in chosen], 2 * unit)
        assert all(
            torch.equal(part, sources[n][begin : begin + 2 * unit])
            for part, (n, begin) in zip(parts, chosen, strict=True)
        )

    def test_parts_of_slots_in_pieces_are_what_the_wholes_have_there(self, parting: PartBackend) -> None:
        """Where room was freed between others, slots may lie in several places."""
        unit = align_up(4 * KIB, parting.capabilities.alignment_bytes)
        small = [stored(parting, pattern(8 * unit, seed)) for seed in range(CAPACITY_BYTES // (16 * unit))]
        for slot in small[::2]:
            succeed(parting.free(slot))
        source = pattern(CAPACITY_BYTES // 4, seed=99)
        slot = stored(parting, source)
        begins = list(range(0, source.numel() - 3 * unit, unit))
        parts = self._read(parting, [slot] * len(begins), begins, 3 * unit)
        assert all(
            torch.equal(part, source[begin : begin + 3 * unit])
            for part, begin in zip(parts, begins, strict=True)
        )

    @pytest.mark.parametrize("shift", [0, 1, 8, 64, 512])
    def test_parts_fill_a_buffer_inside_a_larger_one_alone(self, parting: PartBackend, shift: int) -> None:
        """Wherever it begins in memory."""
        unit = align_up(4 * KIB, parting.capabilities.alignment_bytes)
        source = pattern(8 * unit, seed=1)
        slot = stored(parting, source)
        around = torch.full((6 * unit,), _RUBBISH, dtype=torch.uint8)
        succeed(parting.read_parts([slot] * 3, [5 * unit, 0, unit], unit, around[shift : shift + 3 * unit]))
        expected = torch.cat([source[5 * unit : 6 * unit], source[: 2 * unit]])
        assert torch.equal(around[shift : shift + 3 * unit], expected)
        assert bool((around[:shift] == _RUBBISH).all())
        assert bool((around[shift + 3 * unit :] == _RUBBISH).all())

    def test_later_bytes_are_what_parts_have(self, parting: PartBackend) -> None:
        """And parts leave wholes as they are."""
        unit = align_up(4 * KIB, parting.capabilities.alignment_bytes)
        slot, other = stored(parting, pattern(4 * unit, seed=1)), stored(parting, pattern(unit, seed=3))
        later = pattern(4 * unit, seed=2)
        succeed(parting.write(slot, later))
        (part,) = self._read(parting, [slot], [unit], unit)
        assert torch.equal(part, later[unit : 2 * unit])
        assert torch.equal(contents(parting, slot), later)
        assert torch.equal(contents(parting, other), pattern(unit, seed=3))

    def test_many_reads_of_parts_may_be_under_way(self, parting: PartBackend) -> None:
        """Beside writes, and ended in another order."""
        unit = align_up(4 * KIB, parting.capabilities.alignment_bytes)
        source = pattern(64 * unit, seed=1)
        slot, other = stored(parting, source), parting.reserve(16 * unit)
        buffers = [torch.zeros(16 * unit, dtype=torch.uint8) for _ in range(8)]
        begins = [[(7 * turn + n) % 64 * unit for n in range(16)] for turn in range(8)]
        write = parting.write(other, pattern(16 * unit, seed=2))
        reads = [
            parting.read_parts([slot] * 16, own, unit, into)
            for own, into in zip(begins, buffers, strict=True)
        ]
        for read in reversed(reads):
            succeed(read)
        succeed(write)
        for own, into in zip(begins, buffers, strict=True):
            expected = torch.cat([source[begin : begin + unit] for begin in own])
            assert torch.equal(into, expected)
        assert torch.equal(contents(parting, other), pattern(16 * unit, seed=2))

    def test_a_part_that_is_not_within_its_slot_is_refused(self, parting: PartBackend) -> None:
        """Nor is one of no bytes, nor no part; no byte moves, or the others are told apart."""
        unit = align_up(512, parting.capabilities.alignment_bytes)
        source = pattern(8 * unit + 1, seed=1)
        slot = stored(parting, source)
        into = torch.full((2 * unit,), _RUBBISH, dtype=torch.uint8)
        wrong: list[tuple[list[Slot], list[int], int, torch.Tensor]] = [
            ([slot, slot], [0, 8 * unit], unit, into),
            ([slot, slot], [0, -unit], unit, into),
            ([slot, slot], [0, 2**62], unit, into),
            ([slot], [7 * unit], 2 * unit, into),
            ([slot], [0], 0, into[:0]),
            ([slot], [0], -unit, into),
            ([], [], unit, into[:0]),
            ([slot], [0, 0], unit, into),
            ([slot, slot], [0, 0], unit, into[: 2 * unit - 1]),
            ([slot, slot], [0, 0], unit, torch.zeros(3 * unit, dtype=torch.uint8)),
            ([slot, slot], [0, 0], unit, into.view(2, -1)),
        ]
        for slots, begins, nbytes, buffer in wrong:
            error = refusal(lambda: parting.read_parts(slots, begins, nbytes, buffer))  # noqa: B023
            assert error is not None
            assert isinstance(error, PartialError) or not torch.equal(into[:unit], source[:unit])
            into.fill_(_RUBBISH)
        assert torch.equal(contents(parting, slot), source)

    def test_a_part_that_is_not_aligned_is_refused(self, parting: PartBackend) -> None:
        """Whatever the medium could do otherwise."""
        unit = parting.capabilities.alignment_bytes
        if unit == 1:
            pytest.skip("here every part is aligned")
        slot = stored(parting, pattern(8 * unit, seed=1))
        into = torch.full((2 * unit,), _RUBBISH, dtype=torch.uint8)
        assert refusal(lambda: parting.read_parts([slot, slot], [0, 1], unit, into)) is not None
        assert refusal(lambda: parting.read_parts([slot, slot], [0, unit // 2], unit, into)) is not None
        assert refusal(lambda: parting.read_parts([slot], [0], unit + 1, into[: unit + 1])) is not None

    def test_parts_of_a_freed_slot_are_refused(self, parting: PartBackend) -> None:
        """So are those of somebody else's, and of a closed backend's."""
        unit = parting.capabilities.alignment_bytes
        slot, kept = stored(parting, pattern(4 * unit, seed=1)), stored(parting, pattern(4 * unit, seed=2))
        succeed(parting.free(slot))
        into = torch.zeros(2 * unit, dtype=torch.uint8)
        assert refusal(lambda: parting.read_parts([kept, slot], [0, 0], unit, into)) is not None
        assert (
            refusal(lambda: parting.read_parts([kept, cast("Slot", _Foreign())], [0, 0], unit, into))
            is not None
        )
        assert finish(parting.read_parts([kept, kept], [0, unit], unit, into)) is None
        parting.close()
        assert refusal(lambda: parting.read_parts([kept, kept], [0, unit], unit, into)) is not None

    def test_a_buffer_of_inference_mode_can_be_filled_with_parts(self, parting: PartBackend) -> None:
        """Whoever fills it may be a thread outside that mode."""
        unit = parting.capabilities.alignment_bytes
        source = pattern(4 * unit, seed=1)
        slot = stored(parting, source)
        with torch.inference_mode():
            into = torch.zeros(unit, dtype=torch.uint8)
        succeed(parting.read_parts([slot], [unit], unit, into))
        assert torch.equal(into, source[unit : 2 * unit])


class _Foreign:
    nbytes = 2**20
