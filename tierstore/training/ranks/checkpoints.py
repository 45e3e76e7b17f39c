"""Checkpoints that all processes have made, in each process's own directory.

The rules are those of `tierstore.training.ranks.decision`.  What a directory holds beside its last
checkpoint is kept by `Store.flush`, without a copy of any byte.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from tierstore.errors import BackendError, CapacityError, TierStoreError
from tierstore.formats.safetensors_files import unpack
from tierstore.store import Store
from tierstore.training.checkpoints.document import DOCUMENT, KEPT, METADATA, TABLE_KEYS, unfinished
from tierstore.training.checkpoints.resumed import forget, is_held
from tierstore.training.ranks.decision import HeldCheckpoints, Stamp, decide
from tierstore.training.ranks.meeting import Meeting
from tierstore.training.ranks.where import RankPlace

log = logging.getLogger("tierstore")

STAMP = "ranks"
"""What the document calls it."""

_AGREED = "training/agreed"


class AgreedCheckpoints:
    """The checkpoints of one process, which agrees about them with the others.

    Args:
        where: which process it is.
        meeting: of all of them.
        store: the process's own; durable.
    """

    def __init__(self, where: RankPlace, meeting: Meeting, store: Store) -> None:
        self._where = where
        self._meeting = meeting
        self._store = store
        self.is_agreed = True
        self._last = 0

    # --- what there is ------------------------------------------------------------------------

    def settle_former(self) -> None:
        """Let the store hold the checkpoint that all go on from, and nothing of another; or nothing.

        Raises:
            UsageError: see `decide`; all processes raise the same.  Nothing was changed.
            TierStoreError: another process has ended.
        """
        mine = self._held()
        stamp = decide(self._meeting.exchange(mine, "offload(...), to agree on a checkpoint"))
        if not mine.stamps:
            return
        if stamp is None:
            log.warning("the first checkpoint was not made by all processes: training begins anew")
            forget(self._store)
            return
        self._last = stamp.number
        kept = [key for key in self._store if key.startswith(KEPT)]
        if self._stamp_in(DOCUMENT) == stamp:
            self._store.drop(*kept)
        else:
            log.info("going on from checkpoint %d: a later one was not made by all processes", stamp.number)
            self._go_back(kept)
        if kept:
            self._store.flush()

    def _go_back(self, kept: list[str]) -> None:
        """Let what is kept be what there is."""
        self._store.rename({key: key.removeprefix(KEPT) for key in kept}, replace=True)
        document = self._document(DOCUMENT)
        known = {DOCUMENT, _AGREED, *document["bundles"], *document.get(TABLE_KEYS, ())}
        self._store.drop(*(key for key in self._store if key not in known))

    def _held(self) -> HeldCheckpoints:
        try:
            if not is_held(self._store):
                return HeldCheckpoints()
            found = [each for key in (DOCUMENT, KEPT + DOCUMENT) if (each := self._stamp_in(key)) is not None]
        except TierStoreError as fault:
            return HeldCheckpoints(fault=str(fault))
        agreed = int(self._store.get(_AGREED, device="cpu")) if _AGREED in self._store else 0
        if not found:
            return HeldCheckpoints(
                fault="the directory holds the checkpoint of a run that was alone, or one that is not whole"
            )
        return HeldCheckpoints(tuple(found), agreed)

    def _stamp_in(self, key: str) -> Stamp | None:
        if key not in self._store:
            return None
        found = self._document(key).get(STAMP)
        if found is None:
            return None
        if found["rank"] != self._where.rank:
            raise TierStoreError(
                f"the directory is that of rank {found['rank']}, and this is {self._where.name}"
            )
        return Stamp(found["number"], found["token"], found["world_size"])

    def _document(self, key: str) -> dict[str, Any]:
        flat = self._store.get(key, device="cpu")
        if torch.equal(flat, unfinished()):
            return {}
        document: dict[str, Any] = json.loads(unpack(flat)[1].get(METADATA, "{}"))
        return document

    # --- a new one ----------------------------------------------------------------------------

    @contextmanager
    def attempt(self, made: int) -> Iterator[AgreedAttempt]:
        """See `tierstore.training.checkpoints.agreement.Agreement.attempt`."""
        attempt = AgreedAttempt(self._where, self._meeting, made, is_former_agreed=self.is_agreed)
        try:
            yield attempt
        except BaseException as error:
            attempt.has_failed(error)
            raise
        finally:
            self.is_agreed = self.is_agreed and not attempt.is_ready
        attempt.is_made()
        self.is_agreed, self._last = True, attempt.number

    def forget_former(self) -> None:
        """See `tierstore.training.checkpoints.agreement.Agreement.forget_former`."""
        number = torch.tensor(self._last)
        try:
            self._store.put(_AGREED, number, tier=self._store.tier_names[-1], replace=True)
            self._store.flush(_AGREED, release=KEPT)
        except (BackendError, CapacityError) as error:
            log.warning("the former checkpoint takes room until the next one is made: %s", error)


class AgreedAttempt:
    """One checkpoint that all processes make, or none.

    Args:
        where: which process this is.
        meeting: of all of them.
        made: how many checkpoints were made before.
        is_former_agreed: whether all processes have made the last one that this process has made.

    Attributes:
        keep: see `tierstore.training.checkpoints.agreement.Attempt`.
        release: likewise: what is kept beside one that all have made is of no use.
        number: of the checkpoint.
        is_ready: whether all processes were ready to make it.
    """

    def __init__(self, where: RankPlace, meeting: Meeting, made: int, *, is_former_agreed: bool) -> None:
        self._where = where
        self._meeting = meeting
        self.keep = KEPT
        self.release = KEPT if is_former_agreed else ""
        self.number = made + 1
        self.is_ready = False
        self._is_over = False

    def ready(self) -> Mapping[str, object]:
        """See `tierstore.training.checkpoints.agreement.Attempt.ready`."""
        token = self._tell("", "is not ready for the checkpoint")
        self.is_ready = True
        stamp = {"number": self.number, "token": token, "world_size": self._where.world_size}
        return {STAMP: {"rank": self._where.rank, **stamp}}

    def is_made(self) -> None:
        """Return when all have made it.

        Raises:
            TierStoreError: one has not.
        """
        self._tell("", f"could not make checkpoint {self.number}")
        self._is_over = True

    def has_failed(self, error: BaseException) -> None:
        """Tell the others that there will be none, unless they know."""
        if self._is_over:
            return
        try:
            self._tell(f"{type(error).__name__}: {error}", "")
        except TierStoreError as other:
            if not self._is_over:
                error.add_note(str(other))

    def _tell(self, fault: str, what: str) -> str:
        """Say how this process fares, and hear how the others do; return what all call this attempt."""
        mine = (fault, self.number, uuid.uuid4().hex)
        try:
            told = self._meeting.exchange(mine, "run.checkpoint(...)")
        except TierStoreError:
            self._is_over = True
            raise
        self.number = max(number for _, number, _ in told)
        faults = [
            f"rank {rank} {what}: {fault.rstrip('.')}" for rank, (fault, _, _) in enumerate(told) if fault
        ]
        if faults:
            self._is_over = True
            raise TierStoreError(
                f"{'; '.join(faults)}. The former checkpoint is still the one that all processes go on from."
            )
        return told[0][2]
