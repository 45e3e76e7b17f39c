"""``torch.openreg``: what ``torch.cuda`` is for CUDA, as far as PyTorch, programs and the store ask for it.

There is one device.  A stream is `torch.Stream`, and a context manager itself.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Self

import torch

from tests.accelerator import native

NAME = "openreg"
_DEVICE = torch.device(NAME, 0)
_CYCLES_PER_US = 1000  # of `_sleep`


def Stream(device: object = None, priority: int = 0) -> torch.Stream:  # noqa: N802 - torch's name
    """Make a stream of the device."""
    return torch.Stream(device=_DEVICE, priority=priority)


class Event(torch.Event):
    """A point in a stream of the device."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Self:
        """Make one.  The arguments are those of `torch.cuda.Event`."""
        return super().__new__(
            cls, device=_DEVICE, enable_timing=enable_timing, blocking=blocking, interprocess=interprocess
        )


def current_stream(device: object = None) -> torch.Stream:
    """Return this thread's stream."""
    return torch.accelerator.current_stream(_DEVICE)


def default_stream(device: object = None) -> torch.Stream:
    """Return the stream that threads have at first."""
    return torch.Stream(stream_id=0, device_index=0, device_type=int(_device_type()))


def _device_type() -> int:
    return torch.accelerator.current_stream(_DEVICE).device_type


def stream(stream: torch.Stream) -> torch.Stream:
    """Return what makes ``stream`` this thread's, inside the context."""
    return stream


def set_stream(stream: torch.Stream) -> None:
    """Make ``stream`` this thread's."""
    torch.accelerator.set_stream(stream)


def synchronize(device: object = None) -> None:
    """Block until every stream has done what it was given.

    Raises:
        RuntimeError: some of it failed.
    """
    torch.accelerator.synchronize(_DEVICE)


class device:  # noqa: N801 - torch's name
    """Makes a device the current one, inside the context: there is only one."""

    def __init__(self, device: object) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


def is_available() -> bool:
    """Say that the device is there."""
    return True


def device_count() -> int:
    """Return how many there are."""
    return 1


def current_device() -> int:
    """Return which is the current one."""
    return 0


def set_device(device: object) -> None:
    """Do nothing: there is only one."""


def is_initialized() -> bool:
    """Say that the device is ready."""
    return True


def init() -> None:
    """Do nothing: the device is ready."""


_lazy_init = init
_initialized = True  # torch.utils.checkpoint keeps random numbers only of what has this


def _is_in_bad_fork() -> bool:
    return False


# ---------------------------------------------------------------------- random numbers


def get_rng_state(device: object = None) -> torch.Tensor:
    """Return the state of the device's random numbers."""
    state = ctypes.create_string_buffer(native.generator_state_bytes())
    native.get_generator_state(state)
    return torch.frombuffer(bytearray(state.raw), dtype=torch.uint8)


def set_rng_state(new_state: torch.Tensor, device: object = None) -> None:
    """Set the state of the device's random numbers to what `get_rng_state` returned.

    Raises:
        RuntimeError: it is of another length.
    """
    state = new_state.contiguous().numpy().tobytes()
    if len(state) != native.generator_state_bytes():
        raise RuntimeError(f"a state has {native.generator_state_bytes()} bytes, not {len(state)}")
    native.set_generator_state(state)


def get_rng_state_all() -> list[torch.Tensor]:
    """Return the state of each device."""
    return [get_rng_state()]


def set_rng_state_all(new_states: Sequence[torch.Tensor]) -> None:
    """Set the state of each device."""
    set_rng_state(new_states[0])


def manual_seed(seed: int) -> None:
    """Begin the random numbers that belong to ``seed``."""
    native.seed(seed & (2**64 - 1))


manual_seed_all = manual_seed


def initial_seed() -> int:
    """Return the seed that was set last."""
    seed: int = native.initial_seed()
    return seed


# ---------------------------------------------------------------------- memory


def memory_allocated(device: object = None) -> int:
    """Return the bytes that tensors have."""
    return torch.accelerator.memory_allocated(_DEVICE)


def max_memory_allocated(device: object = None) -> int:
    """Return the most bytes that tensors had since the peak was reset."""
    return torch.accelerator.max_memory_allocated(_DEVICE)


def memory_reserved(device: object = None) -> int:
    """Return the bytes of the allocator's segments."""
    return torch.accelerator.memory_reserved(_DEVICE)


def reset_peak_memory_stats(device: object = None) -> None:
    """Let peaks begin at what there is now."""
    torch.accelerator.reset_peak_memory_stats(_DEVICE)


def empty_cache() -> None:
    """Give segments without tensors back to the device."""
    torch.accelerator.empty_cache()


def mem_get_info(device: object = None) -> tuple[int, int]:
    """Return how many bytes the device has in no segment, and how many it has."""
    return torch.accelerator.get_memory_info(_DEVICE)


class Properties:
    """What `get_device_properties` returns."""

    def __init__(self) -> None:
        self.name = "simulated accelerator"
        self.total_memory: int = native.total_bytes()


def get_device_properties(device: object = None) -> Properties:
    """Return the device's name and memory."""
    return Properties()


def get_device_name(device: object = None) -> str:
    """Return the device's name."""
    return Properties().name


def get_amp_supported_dtype() -> list[torch.dtype]:
    """Return the dtypes of autocast."""
    return [torch.float16, torch.bfloat16, torch.float32]


def _sleep(cycles: int) -> None:
    """Keep the current stream busy, as `torch.cuda._sleep` does."""
    native.keep_busy(current_stream().stream_id, cycles // _CYCLES_PER_US)
