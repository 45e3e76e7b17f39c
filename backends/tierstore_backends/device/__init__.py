"""The device tier: memory of a torch accelerator, or its emulation in host memory.

The option ``device`` says which: a torch device such as ``"cuda"`` or ``"cuda:1"``
(`tierstore_backends.device.streams`), or ``"emulated"`` (`tierstore_backends.device.emulated`).  By
default it is the accelerator if there is one.  The emulation has options of its own:

    link_bandwidth: bytes a second in each direction, as a size ("25GB"); ``None``: no limit.
    link_latency_s: how much later than its last byte a copy ends.
    late_events: a seed: completions come late and overtake each other, by chance from that seed.
    overwrite_freed: whether freed memory is filled with 0xFF, so that a use after it shows.
    stream_ordered: whether writes are stream-ordered, as an accelerator's are.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tierstore.errors import ConfigError
from tierstore.spi import Backend
from tierstore_backends.device.emulated import EmulatedDevice
from tierstore_backends.device.link import EmulatedLink
from tierstore_backends.device.streams import StreamDevice, find_device
from tierstore_backends.options import Options

__all__ = ["EmulatedDevice", "StreamDevice", "open_backend"]

_EMULATED = "emulated"
_EMULATION_OPTIONS = (
    "link_bandwidth",
    "link_latency_s",
    "late_events",
    "overwrite_freed",
    "stream_ordered",
)


def open_backend(*, capacity_bytes: int, options: Mapping[str, object]) -> Backend:
    """Open the device named by the option ``device``.

    Raises:
        ConfigError: an unknown option, a bad value, or a device that torch does not know.
        BackendError: the device is not there, or has no streams.
    """
    name = options.get("device", _default_device())
    if name == _EMULATED:
        return _open_emulated(capacity_bytes, options)
    known = Options("device", options, ("device",))
    try:
        asked = torch.device(known.text("device", default=_default_device()))
    except RuntimeError as error:
        raise ConfigError(
            f"option 'device' is {name!r}. Accepted: a torch device such as 'cuda:1', or 'emulated'"
        ) from error
    device, module = find_device(asked)
    return StreamDevice(capacity_bytes, device, module)


def _default_device() -> str:
    return str(torch.accelerator.current_accelerator()) if torch.accelerator.is_available() else _EMULATED


def _open_emulated(capacity_bytes: int, options: Mapping[str, object]) -> EmulatedDevice:
    known = Options("device", options, ("device", *_EMULATION_OPTIONS))
    bandwidth = known.nbytes("link_bandwidth")
    latency_s = known.seconds("link_latency_s", default=0.0)
    return EmulatedDevice(
        capacity_bytes,
        links=(EmulatedLink(bandwidth, latency_s), EmulatedLink(bandwidth, latency_s)),
        late_seed=known.number("late_events"),
        is_overwriting=known.flag("overwrite_freed", default=False),
        is_stream_ordered=known.flag("stream_ordered", default=False),
    )
