"""Gradients are averaged over all processes one parameter at a time, while backward goes on.

``DistributedDataParallel`` averages in buckets of its own, which are as large as all gradients together, and
keeps every gradient where the model computes.  Where that fits it is the way; this is the way where it does
not: a gradient is averaged before it leaves for the store, and needs room for itself once more.

1. Each parameter's gradient is a message of its own, as its elements lie in memory.  So the order in which
   they are added up over the processes depends on nothing but their number: not on quotas or bundles.
2. Messages are sent in one order everywhere: at first in that of the parameters, from the last on; after the
   first pass in that in which the first process had them ready.  One that is ready before its turn waits.
3. At the end of a pass those that a process has no gradient for are sent as zeros.  What no process has used
   since the last average stays as it is.
4. What is sent is where the model computes, also of modules on the host: groups of NCCL send nothing else.
5. The process waits for each message in backward: a gradient that left for the store meanwhile would have
   to be brought again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import distributed

from tierstore.errors import TierStoreError, UsageError
from tierstore.torch_private import call_after_backward, current_graph_task
from tierstore.training.ranks.meeting import Meeting
from tierstore.training.ranks.where import RankPlace


class GradientAverages:
    """Averages the gradients of one model.

    Args:
        where: which process this is.
        meeting: of all of them.
        parameters: that are trained, by name.
        device: where the model computes.
        stash: told of a parameter that has got the gradient of others alone.

    Raises:
        UsageError: the processes train other parameters; the message names the first that differs.
    """

    def __init__(
        self,
        where: RankPlace,
        meeting: Meeting,
        parameters: Mapping[str, torch.nn.Parameter],
        device: torch.device,
        stash: Callable[[torch.Tensor], None],
    ) -> None:
        self._stash = stash
        self._where = where
        self._meeting = meeting
        self._names = {parameter: name for name, parameter in parameters.items()}
        self._device = device
        self._factor = 1.0 / where.world_size
        self._order = list(parameters.values())[::-1]
        self._is_learned = False
        self._pauses = 0
        self._pass: int | None = None
        self._turn = 0
        self._arrived: dict[torch.nn.Parameter, None] = {}
        self._used: set[torch.nn.Parameter] = set()  # since the last average
        self._late: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
        # A gradient itself is not handed over: what sends it may let go of it at any time later, and it
        # could not leave for the store before.
        self._buffer: torch.Tensor | None = None
        self._compare()
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._accumulated)
            for parameter in parameters.values()
        ]

    def _compare(self) -> None:
        mine = [(name, str(p.dtype), tuple(p.shape)) for p, name in self._names.items()]
        for rank, theirs in enumerate(self._meeting.exchange(mine, "run.average_gradients()")):
            if theirs != mine:
                one, other = next(
                    ((a, b) for a, b in zip(mine, theirs, strict=False) if a != b), (len(mine), len(theirs))
                )
                raise UsageError(
                    f"the processes train different parameters: {one} on rank {self._where.rank}, and "
                    f"{other} on rank {rank}. Build the same model everywhere."
                )

    def send_values(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Let parameters and buffers be those of the first process, one at a time."""
        with torch.no_grad():
            for tensor in tensors.values():
                values = tensor.detach().to(self._device, copy=True, memory_format=torch.contiguous_format)
                distributed.broadcast(values, 0)
                if self._where.rank:
                    tensor.copy_(values)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Return a context in which backward passes only accumulate."""
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1

    def remove(self) -> None:
        """Average no more."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    # --- a pass -------------------------------------------------------------------------------

    def _accumulated(self, parameter: torch.Tensor) -> None:
        """Autograd has accumulated a gradient."""
        assert isinstance(parameter, torch.nn.Parameter)
        self._used.add(parameter)
        if self._pauses:
            return
        if self._pass != current_graph_task():
            self._pass, self._turn = current_graph_task(), 0
            self._arrived, self._late = {}, []
            call_after_backward(self._end)
        self._arrived[parameter] = None
        while self._turn < len(self._order) and self._order[self._turn] in self._arrived:
            self._send_next()

    def _end(self) -> None:
        """The pass is over: send what this process has no gradient for."""
        while self._turn < len(self._order):
            self._send_next()
        flags = torch.tensor([each in self._used for each in self._order], dtype=torch.int32)
        flags = flags.to(self._device)
        self._reduce(flags, "which gradients there are")
        is_used = dict(zip(self._order, flags.tolist(), strict=True))
        self._pass = self._buffer = None
        while self._late:
            parameter, values = self._late.pop(0)
            if is_used[parameter]:
                self._show(parameter, values)
                del values
                self._stash(parameter)
        self._used.clear()
        if not self._is_learned:
            self._learn()

    def _learn(self) -> None:
        """Take the first process's order for everybody's."""
        number_of = {parameter: number for number, parameter in enumerate(self._order)}
        mine = [number_of[each] for each in self._arrived]
        first = self._meeting.exchange(mine, "a backward pass")[0]
        left = [number for number in range(len(self._order)) if number not in set(first)]
        self._order = [self._order[number] for number in [*first, *left]]
        self._is_learned = True

    def _send_next(self) -> None:
        parameter = self._order[self._turn]
        self._turn += 1
        gradient = parameter.grad
        if gradient is not None and gradient.layout is not torch.strided:
            raise UsageError(
                f"the gradient of {self._names[parameter]!r} is sparse, and cannot be averaged one at a "
                "time: make the layer with sparse=False, or use DistributedDataParallel."
            )
        with torch.no_grad():
            flat, values = self._in_buffer(parameter)
            if gradient is None:
                flat.zero_()
            else:
                values.copy_(gradient)
            flat.mul_(self._factor)
            self._reduce(flat, f"the gradient of {self._names[parameter]!r}")
            if parameter in self._used:
                self._show(parameter, values)
            else:
                self._late.append((parameter, values.to(parameter.device, copy=True)))

    def _in_buffer(self, parameter: torch.nn.Parameter) -> tuple[torch.Tensor, torch.Tensor]:
        """Return room for a gradient: its elements as they lie in memory, and as they are seen.

        They lie as the parameter's do, as in PyTorch's buckets.
        """
        if self._buffer is None:
            nbytes = max(each.nbytes for each in self._order)
            self._buffer = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        flat = self._buffer[: parameter.nbytes].view(parameter.dtype)
        shape, stride = parameter.shape, parameter.stride()
        return flat, flat.as_strided(shape, stride) if is_dense(parameter) else flat.view(shape)

    def _show(self, parameter: torch.nn.Parameter, values: torch.Tensor) -> None:
        """Let the average be the gradient; values of others alone are a tensor of their own."""
        with torch.no_grad():
            if parameter.grad is None:
                parameter.grad = values
            else:
                parameter.grad.copy_(values)

    def _reduce(self, values: torch.Tensor, what: str) -> None:
        try:
            distributed.all_reduce(values)
        except RuntimeError as cause:
            raise TierStoreError(
                f"{self._where.name} waited for the others to average {what}, and one of them has ended, or "
                f"did not come in time: {cause}"
            ) from cause


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's elements lie side by side, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
