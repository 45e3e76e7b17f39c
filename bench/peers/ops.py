"""DeepSpeed's operators, which are compiled on the machine that uses them.

``python -m bench.peers.ops`` builds those that the comparison needs; ``make peers`` calls it, so that
no measurement waits for a compiler.  A build takes minutes, and needs a C++ compiler, the headers of Python
and of libaio (Debian: ``apt-get install g++ python3-dev libaio-dev``), and ninja, which is installed
with the peers.
"""

from __future__ import annotations

import os
import sys
from types import ModuleType

from bench.peers.workers import Absent, required, surroundings

NEEDED = ("async_io", "cpu_adam")
_BUILDERS = {"async_io": "AsyncIOBuilder", "cpu_adam": "CPUAdamBuilder"}
_HINT = "apt-get install g++ python3-dev libaio-dev, then .venv-peers/bin/python -m bench.peers.ops"


def load(name: str) -> ModuleType:
    """Load an operator, building it if it was not.

    Raises:
        Absent: DeepSpeed is not installed, or the operator cannot be built here.
    """
    builders = required("deepspeed.ops.op_builder")
    builder = getattr(builders, _BUILDERS[name])()
    if not builder.is_compatible(verbose=False):
        raise Absent(f"DeepSpeed says that its operator {name} cannot be built here: {_HINT}")
    try:
        module: ModuleType = builder.load(verbose=False)
    except Exception as error:  # whatever compilers and loaders raise
        raise Absent(f"DeepSpeed's operator {name} was not built ({error}): {_HINT}") from error
    return module


def _main() -> int:
    os.environ.update(surroundings())
    for name in NEEDED:
        print(
            f"building DeepSpeed's operator {name}, if it is not there yet: this takes minutes ...",
            flush=True,
        )
        try:
            load(name)
        except Absent as error:
            print(f"{error}\nDeepSpeed will be skipped.", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(_main())
