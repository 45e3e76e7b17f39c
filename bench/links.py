"""How slow a link is beside computing: what `swap-step` needs to know of a real accelerator.

An emulated device computes as slowly as the machine under it, but copies as fast as a link is said to.  A
link of 25 GB/s beside two CPU cores would make swapping look free.  So the link is slowed down until moving
the swapped bytes takes the same share of a step as it does for a layer of Llama 7B on a named GPU:

    share = (swapped bytes a token / link) / (operations a token / (peak rate x utilisation))

Bytes and operations are those of one layer; both grow with their number, and with the tokens, alike.
"""

from __future__ import annotations

from dataclasses import dataclass

GB = 1000**3
BF16_BYTES = 2


@dataclass(frozen=True)
class Layer:
    """A layer of Llama.

    Attributes:
        dim, hidden, heads: its sizes.
        length: of sequences.
    """

    dim: int
    hidden: int
    heads: int
    length: int

    @property
    def swapped_bytes(self) -> int:
        """A token's, in bf16: all outputs of attention and feed-forward that backward uses.

        As in `bench.llamas.Size`: five as wide as the model, four as wide as the feed-forward, and a
        logarithm in float32 for each head.
        """
        return BF16_BYTES * (5 * self.dim + 4 * self.hidden) + 4 * self.heads

    @property
    def operations(self) -> int:
        """Floating-point operations for a token, forward and backward, as utilisation is commonly counted.

        6 for each weight, and 12 for each pair of a position and a dimension in attention (appendix B of
        arXiv:2204.02311); causal attention that skips half of it is not counted as less.
        """
        return 6 * (4 * self.dim**2 + 3 * self.dim * self.hidden) + 12 * self.dim * self.length


@dataclass(frozen=True)
class Accelerator:
    """What computes, and its link.

    Attributes:
        name: what it is called.
        operations_a_s: its peak rate in bf16, from its data sheet.
        utilisation: the share of that which training reaches.
        link: bytes a second, each way.
    """

    name: str
    operations_a_s: float
    utilisation: float
    link: int

    def share(self, layer: Layer) -> float:
        """Return the time to move a layer's swapped bytes one way over the time of its step."""
        moving_s = layer.swapped_bytes / self.link
        return moving_s / (layer.operations / (self.operations_a_s * self.utilisation))

    def __str__(self) -> str:
        """Name it with what is assumed of it."""
        return f"{self.name} at {self.utilisation:.0%} of {self.operations_a_s / 1e12:.0f} TFLOP/s"


LLAMA_7B = Layer(dim=4096, hidden=11008, heads=32, length=4096)
A100 = Accelerator("A100", 312e12, 0.5, 25 * GB)


def least_step(share: float, forward_share: float) -> float:
    """Return the least time of a step whose forward waits for all bytes to leave, over that of one without.

    What leaves can do so during forward, what comes back during backward.
    """
    return max(share, forward_share) + max(share, 1 - forward_share)
