"""How fast the simulated accelerator is, so that everything in a step takes the share that it takes on a GPU.

A small model's kernels are over on an A100 before Python has asked for the next; a large one's are not.  So
the device is slowed down until a small model's layers take as long as those of Llama 7B, and the link and the
memory with it.  Then Python is as much of a step as it is there, or more, as it is slower here.
"""

from __future__ import annotations

from dataclasses import dataclass

from bench.links import A100, LLAMA_7B, Layer
from bench.llamas import Size
from bench.workload import BATCH, Workload

MEMORY_OVER_LINK = 1555 / 25
"""GB/s of an A100's memory, by its data sheet, over those of its link."""

STEP_S = 0.4
"""What the kernels of `simulated-step` take, and about what its bytes take each way."""

IDEAL_TOKENS = 32_768
"""In a batch of the run that is held against its ideal: as many as Llama 7B is trained with."""

STATE_OVER_PARAMETERS = 4  # read in a step: parameters for forward and for backward, and two moments


@dataclass(frozen=True)
class Rates:
    """A device's rates.

    Attributes:
        operations: of products of matrices and attention, a second.
        link: bytes a second, each way.
    """

    operations: float
    link: float

    @property
    def memory(self) -> float:
        """Bytes a second that kernels read and write."""
        return self.link * MEMORY_OVER_LINK

    def __str__(self) -> str:
        """Say them."""
        return (
            f"{self.operations / 1e9:.0f} GFLOP/s, memory {self.memory / 1e9:.1f} GB/s, "
            f"link {self.link / 1e9:.2f} GB/s each way"
        )


def for_llama(size: Size, share: float) -> Rates:
    """Let products of a layer take as long as those of Llama 7B, on sequences of 4096, on an A100.

    Args:
        size: of the model.
        share: the time to move all marked bytes one way, over that of the products.
    """
    layer_s = LLAMA_7B.operations * LLAMA_7B.length / (A100.operations_a_s * A100.utilisation)
    layer = Layer(size.dim, size.config.hidden, size.heads, size.length)
    return Rates(
        operations=layer.operations * size.tokens / layer_s,
        link=size.marked_bytes / (share * size.layers * layer_s),
    )


def for_workload(workload: Workload) -> Rates:
    """Let the products take `STEP_S`, and what is read in a step as long on the link."""
    operations = 6 * workload.parameter_bytes / 4 * BATCH
    seconds = STEP_S * workload.share
    return Rates(
        operations=operations / seconds,
        link=STATE_OVER_PARAMETERS * workload.parameter_bytes / seconds,
    )


def for_large_batches(workload: Workload) -> Rates:
    """Let the products take `STEP_S`, and the link be as slow beside them as 25 GB/s are beside an A100's.

    The A100 trains on `IDEAL_TOKENS` tokens: six operations a parameter and token, at the utilisation of
    `bench.links`.  What is used of a parameter, in float32, is four times 4 bytes.
    """
    bytes_s = STATE_OVER_PARAMETERS * 4 / (A100.link)
    products_s = 6 * IDEAL_TOKENS / (A100.operations_a_s * A100.utilisation)
    seconds = STEP_S * workload.share
    return Rates(
        operations=6 * workload.parameter_bytes / 4 * BATCH / seconds,
        link=STATE_OVER_PARAMETERS * workload.parameter_bytes / (seconds * bytes_s / products_s),
    )
