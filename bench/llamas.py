"""The Llama of the activation figures: its bytes from its shapes, and how it is trained.

It is the example's own, 8 layers in float32, with as many tokens in a batch that activations are most of what
the device holds, as they are where swapping is worth a thought.  Proportions are those of a large one: the
feed-forward is 2.75 times as wide as the model.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import tierstore as ts
from bench.links import GB
from device_budget import moved_to_device
from llama import Llama, LlamaConfig
from tierstore.testing.memory import DeviceBudget
from tierstore.training import Swap, recompute, swap

MIB = 1024**2
FLOAT32_BYTES = 4
SwapMarks = Mapping[str, object]
STAYS_BELOW_BYTES = 4096  # smaller storages are not swapped
UNLIMITED_BYTES = 1024**4  # of a quota or a budget, where only the peak is of interest


@dataclass(frozen=True)
class Size:
    """How large the model is, and its batch."""

    dim: int = 256
    heads: int = 4
    layers: int = 8
    batch: int = 8
    length: int = 512

    @classmethod
    def scaled(cls, scale: float) -> Size:
        """Return one with about ``scale`` of the tokens; below a tenth a narrower one, for a look."""
        length = max(64, round(cls.length * min(1.0, scale * 4)))
        batch = max(2, round(cls.batch * cls.length * scale / length))
        return cls(batch=batch, length=length) if scale >= 0.1 else cls(64, 2, 8, batch, length)

    @classmethod
    def of_a_gpu(cls, scale: float) -> Size:
        """Return one whose activations take about ten gigabytes; below a tenth a small one, for a look."""
        return cls(1024, 16, 8, max(1, round(8 * scale)), 2048) if scale >= 0.1 else cls(64, 2, 4, 2, 256)

    @property
    def tokens(self) -> int:
        """In a batch."""
        return self.batch * self.length

    @property
    def config(self) -> LlamaConfig:
        """The example's configuration, nothing recomputed."""
        return LlamaConfig(dim=self.dim, heads=self.heads, layers=self.layers, is_recomputed=False)

    @property
    def wide_bytes(self) -> int:
        """One tensor as wide as the feed-forward."""
        return FLOAT32_BYTES * self.config.hidden * self.tokens

    @property
    def attention_bytes(self) -> int:
        """What backward uses of the outputs of one layer's attention operators.

        Queries and keys after their rotation, values, what attention made of them and the same with heads
        side by side; and a logarithm for each head.
        """
        narrow_bytes = FLOAT32_BYTES * self.dim * self.tokens
        logarithms_bytes = FLOAT32_BYTES * self.heads * self.tokens
        return 5 * narrow_bytes + (logarithms_bytes if logarithms_bytes >= STAYS_BELOW_BYTES else 0)

    @property
    def feed_forward_bytes(self) -> int:
        """The same of one layer's feed-forward: ``w1 x``, its SiLU, ``w3 x``, and the product of the two."""
        return 4 * self.wide_bytes

    @property
    def marked_bytes(self) -> int:
        """All outputs of attention and feed-forward operators that backward uses, in all layers."""
        return self.layers * (self.attention_bytes + self.feed_forward_bytes)

    def __str__(self) -> str:
        """Name it by its sizes."""
        parameters = self.config.parameters / 1e6
        return (
            f"a Llama of {self.layers} layers, dim {self.dim}, {parameters:.1f} M parameters, {self.batch} "
            f"sequences of {self.length}"
        )


def marks(prefetch: int, layers: Sequence[int] | bool = True, feed_forward: int | None = None) -> SwapMarks:
    """Return the ``swap_config`` that marks all attention and feed-forward operators of some layers.

    Args:
        prefetch: ``backward_prefetch`` of both.
        layers: their numbers; ``True``: all.
        feed_forward: another one for the feed-forward.
    """
    kept = layers if isinstance(layers, bool) else list(layers)
    prefetches = {"attention": prefetch, "feed_forward": feed_forward or prefetch}
    return {
        "swap": True,
        "op_swap": [
            {"op_name": name, "backward_prefetch": each, "layers": kept} for name, each in prefetches.items()
        ],
    }


@dataclass(frozen=True)
class Manner:
    """How activations are treated.

    Attributes:
        swap: a ``swap_config``; ``None``: nothing is swapped.
        recompute: a ``recompute_config``; ``None``: nothing is recomputed by us.
        is_checkpointed: whether PyTorch's own checkpoint is around every layer.
        link: bytes a second, each way; ``None``: as fast as the machine copies.
        quota: of what is swapped and on the device, in bytes; ``None``: none.
        device: ``"emulated"``, or a torch device.
        around: makes of the model a context that its forward is in.
    """

    swap: Mapping[str, object] | None = None
    recompute: Mapping[str, object] | None = None
    is_checkpointed: bool = False
    link: int | None = None
    quota: int | None = None
    device: str = "emulated"
    around: Callable[[nn.Module], contextlib.AbstractContextManager[object]] = contextlib.nullcontext

    @property
    def torch_device(self) -> torch.device:
        """Where the model computes."""
        return torch.device("cpu" if self.device == "emulated" else self.device)

    def new_store(self) -> ts.Store:
        """Make a store, none of whose quotas matters but that of this manner."""
        is_emulated = self.device == "emulated"
        config = ts.OffloadConfig(
            device=self.device,
            max_device_memory=self.quota or (UNLIMITED_BYTES if is_emulated else None),
            offload_cpu_size=8 * GB if is_emulated else None,
            offload_disk_size=0,
            device_options={"link_bandwidth": self.link} if self.link else {},
        )
        return ts.Store(config.store_config())


class Trainee:
    """The model in training; a context manager.

    Args:
        size: of the model.
        manner: how its activations are treated.
    """

    def __init__(self, size: Size, manner: Manner) -> None:
        self.size = size
        self._manner = manner
        self._stack = contextlib.ExitStack()
        torch.manual_seed(0)
        config = LlamaConfig(
            dim=size.dim, heads=size.heads, layers=size.layers, is_recomputed=manner.is_checkpointed
        )
        self._model: nn.Module = moved_to_device(Llama(config), manner.torch_device)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-3)
        self._chance = torch.Generator().manual_seed(1)
        self._losses: list[torch.Tensor] = []
        self.swap: Swap | None = None
        if manner.recompute is not None:
            # Numbers are layers where swap is on, which only the other section tells.
            sections = {"recompute_config": manner.recompute, "swap_config": manner.swap or {"swap": False}}
            self._stack.enter_context(recompute(self._model, sections, layers="layers"))
        if manner.swap is not None:
            store = self._stack.enter_context(manner.new_store())
            self.swap = self._stack.enter_context(
                swap(self._model, manner.swap, layers="layers", store=store)
            )

    @property
    def losses(self) -> torch.Tensor:
        """The losses of all steps so far."""
        return torch.stack(self._losses)

    def step(self) -> float:
        """Train on the next batch, as any loop does; return the seconds of its forward."""
        size, device = self.size, self._manner.torch_device
        text = torch.randint(256, (size.batch, size.length + 1), generator=self._chance).to(device)
        begun = time.perf_counter()
        with self._manner.around(self._model):
            logits = self._model(text[:, :-1])
        loss = cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
        forward_s = time.perf_counter() - begun
        del logits
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._losses.append(loss.detach().clone())
        return forward_s

    def seconds(self) -> tuple[float, float]:
        """Train one step; return the seconds of its forward and of all of it.

        On an accelerator, all of it is when the device has done it; forward only what it took to ask for it.
        """
        begun = time.perf_counter()
        forward_s = self.step()
        if self._manner.torch_device.type != "cpu":
            torch.accelerator.synchronize(self._manner.torch_device)
        return forward_s, time.perf_counter() - begun

    @property
    def moved(self) -> str:
        """What was swapped, in words."""
        assert self.swap is not None
        did, steps = self.swap.stats().activations, len(self._losses)
        left, stayed = did.released_bytes / steps / MIB, did.handed_over_bytes / steps / MIB
        return (
            f"{left:.0f} MiB a step left the device, {stayed:.0f} MiB were wanted before; "
            f"{did.stalls / steps:.0f} waits"
        )

    def close(self) -> None:
        """End swapping and recomputing."""
        self._stack.close()

    def __enter__(self) -> Trainee:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


@dataclass(frozen=True)
class Peak:
    """What two steps on the emulated device came to."""

    nbytes: int
    losses: torch.Tensor


def peak(size: Size, manner: Manner) -> Peak:
    """Train two steps under a meter that asks nobody: parameters, Adam's moments, gradients, activations."""
    with DeviceBudget(UNLIMITED_BYTES) as budget, Trainee(size, manner) as trainee:
        trainee.step()
        trainee.step()
        return Peak(budget.peak_bytes, trainee.losses)


def allocated_peak(size: Size, manner: Manner) -> int:
    """Return the most bytes that a manner has on its accelerator, by the allocator, in its second step."""
    torch.accelerator.synchronize()
    before_bytes = torch.accelerator.memory_allocated()
    with Trainee(size, manner) as trainee:
        trainee.seconds()
        torch.accelerator.reset_peak_memory_stats()
        trainee.seconds()
        return torch.accelerator.max_memory_allocated() - before_bytes
