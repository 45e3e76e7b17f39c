"""Builds the simulated accelerator out of ``csrc`` with the system's C++ compiler: 15 seconds, once.

1. What is built lies in ``build/accelerator``, in a folder named for sources, flags and PyTorch's version.
2. It appears whole or not at all.  Of several processes one builds; the others wait for it.
3. It needs a compiler that knows C++20, and nothing else: PyTorch brings its headers, Python's are not used.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

_SOURCES = Path(__file__).parent / "csrc"
_BUILT = Path(__file__).parents[2] / "build" / "accelerator"
_TORCH = Path(torch.__file__).parent
_ABI = int(torch.compiled_with_cxx11_abi())
_COMPILE = [
    *("-std=c++20", "-O1", "-fPIC", "-Wall"),
    *("-isystem", str(_TORCH / "include"), f"-D_GLIBCXX_USE_CXX11_ABI={_ABI}"),
]
_LINK = ["-shared", "-L", str(_TORCH / "lib"), "-ltorch_cpu", "-ltorch", "-lc10"]
_UNITS = (
    ("allocator", "counters", "device_memory", "fallback", "interface", "operators", "pace", "streams"),
    ("pinned", "runtime", "sparse"),
)
"""What is compiled together: reading PyTorch's headers takes most of the time, and there are two cores."""
_PROBE = "#include <concepts>\nstatic_assert(std::integral<int>);\n"


class NoCompilerError(ImportError):
    """There is no C++20 compiler here: the accelerator cannot be simulated."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason, name="openreg")


def library() -> Path:
    """Return the shared library, built now if it is not there.  Blocks for 15 seconds then.

    Raises:
        NoCompilerError: no compiler here knows C++20.
        RuntimeError: a source is in no unit, or the compiler refuses them: its words are in the message.
    """
    built = _BUILT / _key() / "openreg.so"
    if built.exists():
        return built
    compiler = _find_compiler()
    built.parent.mkdir(parents=True, exist_ok=True)
    with (built.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            _build(compiler, built)
    return built


def _key() -> str:
    told = hashlib.sha256(repr((torch.__version__, _COMPILE, _LINK, _UNITS)).encode())
    for path in sorted(_SOURCES.iterdir()):
        told.update(path.name.encode() + b"\0" + path.read_bytes())
    return told.hexdigest()[:16]


def _find_compiler() -> str:
    asked = os.environ.get("CXX")
    for name in [asked] if asked else ["c++", "g++", "clang++"]:
        found = shutil.which(name)
        if found and _compiles([found, "-std=c++20", "-fsyntax-only", "-x", "c++", "-"]):
            return found
    raise NoCompilerError(
        f"no C++20 compiler: {asked or 'c++, g++, clang++'} is not there or does not know it"
    )


def _compiles(command: Sequence[str]) -> bool:
    return subprocess.run(command, input=_PROBE, text=True, capture_output=True, check=False).returncode == 0


def _build(compiler: str, built: Path) -> None:
    if left_out := {path.stem for path in _SOURCES.glob("*.cpp")}.difference(*_UNITS):
        raise RuntimeError(f"in no unit: {', '.join(sorted(left_out))}")
    with tempfile.TemporaryDirectory(dir=built.parent) as folder:
        units = [Path(folder) / f"unit_{number}.cpp" for number in range(len(_UNITS))]
        for unit, names in zip(units, _UNITS, strict=True):
            unit.write_text("".join(f'#include "{name}.cpp"\n' for name in names))
        objects = [unit.with_suffix(".o") for unit in units]
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
            commands = [
                [compiler, *_COMPILE, "-I", str(_SOURCES), "-c", str(unit), "-o", str(target)]
                for unit, target in zip(units, objects, strict=True)
            ]
            list(threads.map(_run, commands))
        made = Path(folder) / built.name
        _run([compiler, *map(str, objects), *_LINK, "-o", str(made)])
        made.replace(built)


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, text=True, capture_output=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
