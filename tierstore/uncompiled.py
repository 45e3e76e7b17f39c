"""Functions that ``torch.compile`` leaves alone, in programs that never compile as well.

``torch.compiler.disable`` is PyTorch's decorator for that.  It imports the compiler, which takes seconds, as
soon as it is used, and it puts a call around the function.  `uncompiled` says the same where the compiler
looks for it, on the function and on its code: nothing is imported, and a call costs nothing.

1. What is traced ends its graph before a call of such a function, as it does with PyTorch's decorator.
2. Where the compiler evaluates frames, that of such a function runs as it is, and so do those of all that it
   calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from tierstore.torch_private import SKIP_FRAME_AND_CALLS, set_frame_strategy

P = ParamSpec("P")
R = TypeVar("R")


def uncompiled(function: Callable[P, R]) -> Callable[P, R]:
    """Let the compiler leave a function alone, with all that it calls; return the function itself.

    Args:
        function: one of Python's, no class and no object that can be called.  Functions that one ``def``
            makes anew share their code: all of them are left alone.
    """
    set_frame_strategy(function.__code__, SKIP_FRAME_AND_CALLS)
    vars(function)["_torchdynamo_disable"] = True
    return function
