"""How rows, and what is said of them, come to the processes that want them.

1. It goes over host memory (gloo), where rows are, in a group of its own: whatever carries gradients of
   other parameters meanwhile does not come into its order.
2. Every exchange begins with a header: what the process is about to do, with which table, and how often
   it did that before.  Where they differ all processes raise the same; nothing is sent of rows then.
3. Its timeout is that of the program's own process group.  One that leaves before says why
   (`tierstore.training.ranks.partings`), and whoever waits for it raises at once.
4. What is interrupted in its midst, between a header and the last message after it, cannot be gone on with:
   the next header would come where rows are waited for.  The process leaves then.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Final, NamedTuple, TypeVar

import torch
from torch import distributed

from tierstore.errors import TierStoreError, UsageError
from tierstore.training.ranks.acts import Act
from tierstore.training.ranks.partings import Parting, Partings
from tierstore.training.ranks.where import RankPlace

T = TypeVar("T")


_SAID: Final = {
    Act.LOOKUP: "look up {table} (lookup {number})",
    Act.ROWS: "read rows of {table} with table.rows",
    Act.SET_ROWS: "write rows of {table} with table.set_rows",
    Act.GRADIENTS: "average the gradients of tables at the end of backward pass {number}",
    Act.GROW: "let table {name!r} grow to {detail} rows",
    Act.LOAD: "read files into {table}",
    Act.COPY: "load a state dict into {table}",
    Act.EXPORT: "export {table}",
    Act.SAVE: "call run.save",
    Act.SUSPEND: "call run.suspend",
    Act.RESUME: "call run.resume",
    Act.CHECKPOINT: "call run.checkpoint",
    Act.CLOSE: "close the run",
    Act.RETURN: "close the run, and bring {table} back",
    Act.FIRST_ROWS: "open a run with rows of table {name!r} that rank 0 has written, in {detail} columns",
}


_THE_SAME: Final = (
    "All have to make the same calls in the same order, with as many rows in the tables: end an epoch at the "
    "same step everywhere, and look up an empty batch where one has no more."
)
_SHOWN: Final = 300  # characters of another's error


class Announcement(NamedTuple):
    """What a process is about to do.

    Attributes:
        act: what.
        table: number of the table; 0 where it is about all.
        number: how often it did that before, and once more.
        detail: what else has to be the same: how many rows there are, or will be.
    """

    act: int
    table: int
    number: int
    detail: int


class RowExchange:
    """Sends rows to and fro.  Every process makes one at the same point, and calls the same, in one order.

    Args:
        where: which process this is.
        names: of the tables, by their numbers.

    Raises:
        TierStoreError: another process has ended.
    """

    def __init__(self, where: RankPlace, names: Sequence[str]) -> None:
        self.where = where
        self._names = names
        self._group: distributed.ProcessGroup | None = None
        self._done: dict[tuple[int, int], int] = {}
        self._busy = threading.Lock()
        self._is_midway = False
        self._now: Announcement | None = None  # what this process does, or did last
        self._failure: Exception | None = None  # of an exchange, for another process
        self._why_left = "the run that had spread tables over processes is closed"
        with self._told():
            self._group = distributed.new_group(backend="gloo", timeout=_timeout())
        assert self._group is not None
        self._partings = Partings(where, self._group)
        try:  # who left at once, as what it opens is refused, would end what others connect to still
            self.swap(torch.zeros(where.world_size, 1, dtype=torch.int64, device="cpu"))
        except BaseException as error:
            self.leave_with(error)
            raise

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Return a context for what belongs together; another thread or a signal's handler is refused.

        Where it is left by an exception before `end`, in the midst of an exchange, there are no more of them.

        Raises:
            UsageError: an exchange is under way, or the process has left.
        """
        if not self._busy.acquire(blocking=False):
            raise UsageError(
                "rows of tables are on their way between processes: use tables from one thread, and not in a "
                "signal's handler"
            )
        try:
            self._require_group()
            yield
        except BaseException as error:
            if self._is_midway:
                self.leave_with(error)
                self._why_left = (
                    f"{self.where.name} exchanges no rows of tables any more: it was interrupted in the "
                    f"midst of that by {_in_short(error)}"
                )
            raise
        finally:
            self._is_midway = False
            self._busy.release()

    def _require_group(self) -> None:
        if self._group is None:
            raise UsageError(self._why_left)

    def is_over(self) -> bool:
        """Whether this process has left: no rows can be exchanged any more."""
        return self._group is None

    def end(self) -> None:
        """All that belongs to what was begun is sent and there: whatever is raised now, others can go on."""
        self._is_midway = False

    def begin(self, act: Act, table: int, detail: int, counts: torch.Tensor) -> torch.Tensor:
        """Say what this process is about to do, and to each how much it sends; return what each sends here.

        What is said is always as long: gloo ends a process that gets a message of another length.

        Args:
            act: what.
            table: number of the table.
            detail: see `Announcement`.
            counts: int64 ``[processes]``.

        Returns:
            int64 ``[processes]``.

        Raises:
            UsageError: they do different things; all raise the same.
            TierStoreError: another process has ended, or did not come in time.
        """
        number = self._done[act, table] = self._done.get((act, table), 0) + 1
        mine = Announcement(act, table, number, detail)
        self._now = mine
        self._is_midway = True
        said = torch.tensor(mine).expand(self.where.world_size, len(mine))
        told = self.swap(torch.cat([said, counts[:, None]], 1))
        headers = [Announcement(*each) for each in told[:, : len(mine)].tolist()]
        if any(each != mine for each in headers):
            self._done[act, table] = number - 1  # nobody has done it
            self.end()
            raise UsageError(self._difference(headers))
        return told[:, -1]

    def agree(self, act: Act, table: int = 0, detail: int = 0) -> None:
        """Return when all processes have come to do the same; see `begin`, which sends no rows."""
        with self.alone():
            self.begin(
                act, table, detail, torch.zeros(self.where.world_size, dtype=torch.int64, device="cpu")
            )
            self.end()

    def swap(self, values: torch.Tensor) -> torch.Tensor:
        """Send a row of ``[processes, k]`` to each; return what each has sent."""
        return self._all_to_all(values, None, None)

    def _difference(self, headers: Sequence[Announcement]) -> str:
        said = "; ".join(f"rank {rank} is to {self._in_words(each)}" for rank, each in enumerate(headers))
        return (
            f"the processes do different things with tables whose rows are spread over them: {said}. "
            f"{_THE_SAME}"
        )

    def _in_words(self, header: Announcement | None) -> str:
        if header is None:
            return "open a run"
        name = self._names[header.table]
        words = _SAID[Act(header.act)].format(
            table=f"table {name!r} of {header.detail} rows",
            number=header.number,
            name=name,
            detail=header.detail,
        )
        return words if header.act in (Act.LOOKUP, Act.GRADIENTS) else f"{words} (call {header.number})"

    def send(self, values: torch.Tensor, counts: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
        """Send rows of a tensor to each; return what each has sent, in order of rank.

        Args:
            values: ``[n, ...]``, contiguous: those for rank 0 first.
            counts: how many are for each rank.
            theirs: how many each rank sends here.
        """
        return self._all_to_all(values, counts.tolist(), theirs.tolist())

    def send_both(
        self, one: torch.Tensor, two: torch.Tensor, counts: torch.Tensor, theirs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Send rows of two tensors with as many in one message; otherwise as `send`."""
        parts = _bytes(one), _bytes(two)
        got = self.send(torch.cat(parts, 1), counts, theirs)
        first, second = got.split([each.shape[1] for each in parts], 1)
        return _rows(first, one), _rows(second, two)

    def gather(self, mine: torch.Tensor) -> list[torch.Tensor]:
        """Return what each gave, by rank: small tensors of one shape and type."""
        found = [torch.empty_like(mine) for _ in range(self.where.world_size)]
        with self._told():
            distributed.all_gather(found, mine, group=self._group)
        return found

    def share(self, mine: T) -> T:
        """Return what the first process gave; it is pickled."""
        found = [mine]
        with self._told():
            distributed.broadcast_object_list(found, group=self._group, group_src=0)
        return found[0]

    def tell(self, flag: int) -> int:
        """Return the number that the first process gave."""
        told = torch.tensor([flag], device="cpu")
        with self._told():
            distributed.broadcast(told, group=self._group, group_src=0)
        return int(told)

    def _all_to_all(
        self, values: torch.Tensor, counts: list[int] | None, theirs: list[int] | None
    ) -> torch.Tensor:
        got = values.new_empty((len(values) if theirs is None else sum(theirs), *values.shape[1:]))
        into, of = _bytes(got), _bytes(values)  # gloo knows few types
        with self._told():
            distributed.all_to_all_single(into, of, theirs, counts, group=self._group)
        return got

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, ValueError) as cause:
            if isinstance(cause, TierStoreError):
                raise
            self._failure = self._explained(cause)
            raise self._failure from cause

    def _explained(self, cause: Exception) -> TierStoreError:
        """Return what to raise as an exchange has failed: who has left, and why, if that was said."""
        mine = f"{self.where.name} is to {self._in_words(self._now)}"
        partings = [] if self._group is None else self._partings.others()
        said = "; ".join(f"rank {each.rank} {each.why}" for each in partings if each.is_first)
        if not said:
            noticed = "".join(f"; rank {each.rank} {each.why}" for each in partings)
            return TierStoreError(
                f"{mine} and waited for the others, and one of them has ended, is in something else, or did "
                f"not come in time{noticed}: {cause}"
            )
        if any(each.is_by_error for each in partings if each.is_first):
            return TierStoreError(f"{mine}, and {said}")
        return UsageError(f"{mine}, and {said}. {_THE_SAME}")

    # --- the end --------------------------------------------------------------------------------

    def leave_with(self, error: BaseException) -> None:
        """Exchange no more, as something has failed, and tell the others what.  Idempotent."""
        causes: list[BaseException] = []
        seen: BaseException | None = error
        while seen is not None and seen not in causes:
            causes.append(seen)
            seen = seen.__cause__ or seen.__context__
        is_first = self._failure not in causes
        why = f"has left its run with {_in_short(error)}" if is_first else "has waited in vain, too"
        self._leave(Parting(self.where.rank, why, is_by_error=True, is_first=is_first))

    def close(self) -> None:
        """Exchange no more, as the run has ended.  Idempotent."""
        self._leave(Parting(self.where.rank, "has closed its run"))

    def _leave(self, parting: Parting) -> None:
        group, self._group = self._group, None
        if group is None:
            return
        self._partings.say(parting)
        # The program may have ended all groups before its run.
        with contextlib.suppress(ValueError, RuntimeError, AssertionError):
            distributed.destroy_process_group(group)


def _in_short(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}".rstrip(": ")
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _timeout() -> timedelta:
    """Return how long the program's own group waits."""
    assert distributed.group.WORLD is not None
    device = "cpu" if "cpu:" in distributed.get_backend_config() else "cuda"
    options = distributed.group.WORLD._get_backend(torch.device(device)).options  # noqa: SLF001 - no other way
    timeout: timedelta = options._timeout  # noqa: SLF001
    return timeout


def _rows(rows: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return rows of bytes as rows of another tensor are."""
    made = like.new_empty((len(rows), *like.shape[1:]))
    _bytes(made).copy_(rows)
    return made


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same memory, row by row; a copy where that has gaps, or strides of its own."""
    rows = tensor.contiguous().view(len(tensor), math.prod(tensor.shape[1:]))
    if rows.stride(1) != 1:  # as of one element or none, which is contiguous in any case
        rows = rows.new_empty(rows.shape).copy_(rows)
    return rows.view(torch.uint8)
