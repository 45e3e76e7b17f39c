"""Host memory for what `Store.get` hands out."""

from __future__ import annotations

import pytest

from tierstore.output_buffers import ALIGNMENT_BYTES, SMALLEST_BYTES, OutputBufferPool
from tierstore.testing.memory import DeviceBudget

SIZES = [0, 1, 100, SMALLEST_BYTES - 1, SMALLEST_BYTES, SMALLEST_BYTES + 1]


@pytest.mark.parametrize("nbytes", SIZES)
def test_outputs_of_any_size_are_host_memory_and_none_of_the_devices(nbytes: int) -> None:
    pool = OutputBufferPool()
    with DeviceBudget(0) as budget:
        output = pool.take(nbytes)
        assert output.nbytes == nbytes
        assert budget.peak_bytes == 0


@pytest.mark.parametrize("nbytes", SIZES[1:])
def test_outputs_are_aligned_as_torchs_own_tensors_are(nbytes: int) -> None:
    outputs = [OutputBufferPool().take(nbytes) for _ in range(8)]
    assert [output.data_ptr() % ALIGNMENT_BYTES for output in outputs] == [0] * 8
