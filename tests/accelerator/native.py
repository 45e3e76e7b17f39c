"""The functions of the simulated accelerator's library.  Loading it makes PyTorch know the device."""

from __future__ import annotations

import ctypes

import torch  # noqa: F401 - its libraries are what ours is linked to

from tests.accelerator.build import library

_library = ctypes.CDLL(str(library()))

_VOID = None
_INT, _I64, _U64, _DOUBLE, _TEXT, _BYTES = (
    ctypes.c_int,
    ctypes.c_int64,
    ctypes.c_uint64,
    ctypes.c_double,
    ctypes.c_char_p,
    ctypes.c_char_p,
)


def _function(name: str, result: type | None, *arguments: type) -> ctypes._NamedFuncPointer:
    function = getattr(_library, f"openreg_{name}")
    function.restype, function.argtypes = result, arguments
    return function  # type: ignore[no-any-return]


set_delays = _function("set_delays", _VOID, _INT, _INT, _U64)
set_pace = _function("set_pace", _VOID, _DOUBLE, _DOUBLE, _DOUBLE)
busy_ms = _function("busy_ms", _DOUBLE, _INT)
set_overwriting = _function("set_overwriting", _VOID, _INT)
set_memory_limit = _function("set_memory_limit", _VOID, _U64)
total_bytes = _function("total_bytes", _U64)
drain = _function("drain", _VOID)
hold = _function("hold", _I64, _I64)
release = _function("release", _VOID, _I64)
keep_busy = _function("keep_busy", _VOID, _I64, _I64)
register_host = _function("register_host", _INT, _U64, _U64)
unregister_host = _function("unregister_host", _INT, _U64)
seed = _function("seed", _VOID, _U64)
initial_seed = _function("initial_seed", _U64)
generator_state_bytes = _function("generator_state_bytes", _U64)
get_generator_state = _function("get_generator_state", _VOID, _BYTES)
set_generator_state = _function("set_generator_state", _VOID, _BYTES)
counts = _function("counts", _TEXT)
