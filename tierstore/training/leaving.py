"""How a run is left: everything is brought back as ordinary tensors, or stays where it lies.

1. What is brought back is restored key by key, and each key's room in the store is free then, so that the
   peak is what everything takes, and one bundle.
2. Restoring that fails half-way leaves the run open: what was not restored is in the store as before.  Where
   memory is short, what was restored is taken back at once, so that the run has as much room as before; else
   it stays as it is, and is taken back when the run goes on (`go_on`): a forward, a backward pass, a step, a
   checkpoint.  Nothing is given twice, and nothing is lost.
3. One interrupt (Ctrl-C) does not stop it: it is raised in the end.  A second one does.
4. Only what is certainly gone, as its key is not in the store or the store is closed, is lost:
   `tierstore.training.bundles.ending`.
5. Releasing reads no byte and takes no memory: tensors become placeholders that say where their bytes lie.
   A durable directory keeps what the last checkpoint made durable; scratch space keeps nothing.
6. With neither asked for, everything is brought back if it fits (`tierstore.training.budgets.host_room`).
"""

from __future__ import annotations

import contextlib
import enum
import errno
import functools
import logging
import traceback
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch

from tierstore.errors import KeyNotFound, StoreClosed, TierStoreError, UsageError
from tierstore.nn.table_weight import TableWeight
from tierstore.progress import progress
from tierstore.training.autograd.gradient import Gradient
from tierstore.training.budgets.host_room import Need, Shortage, host_tiers, needs_of_bundle, shortage
from tierstore.training.bundles.bindings import Binding
from tierstore.training.bundles.ending import RunEnding
from tierstore.training.bundles.layout import TensorLayout
from tierstore.training.bundles.leasing import LeasingState
from tierstore.training.bundles.pinning import pin
from tierstore.training.sharding.refusals import refuse_for_shards
from tierstore.units import MIB, format_bytes

if TYPE_CHECKING:
    from tierstore.training.session import Session

log = logging.getLogger("tierstore")

_MOST_INTERRUPTS = 1
_GONE = (KeyNotFound, StoreClosed)  # there is nothing to read, and there will not be
_BLOCK_BYTES = 64 * MIB  # in which rows are counted that come back from others
_SHRINK_BYTES = 64 * MIB  # so much has left the store before its tiers give memory back


class OnClose(enum.Enum):
    """What becomes of a run's tensors when it is left."""

    AUTO = "auto"  # brought back if they fit with room to spare, else released
    RESTORE = "restore"  # brought back
    RELEASE = "release"  # left where they lie


def choice_of(restore: object, on_close: OnClose) -> OnClose:
    """Return what ``run.close(restore=...)`` means.

    Args:
        restore: as it was given.
        on_close: what `offload` was told.

    Raises:
        UsageError: it is something else.
    """
    if restore is None:
        return on_close
    if not isinstance(restore, bool):
        raise UsageError(
            f"run.close(restore={restore!r:.80}): accepted is True (bring everything back), False (leave it "
            "where it lies) or None (what on_close says)."
        )
    return OnClose.RESTORE if restore else OnClose.RELEASE


def on_close_of(given: object) -> OnClose:
    """Return what ``offload(..., on_close=...)`` means.

    Raises:
        UsageError: it is something else.
    """
    for each in OnClose:
        if given == each.value:
            return each
    accepted = ", ".join(repr(each.value) for each in OnClose)
    raise UsageError(f"offload(..., on_close={given!r:.80}): accepted is one of {accepted}.")


class _LeavingKey(NamedTuple):
    """One key of the store, and the tensors that it is for.

    Attributes:
        bring: makes these ordinary ones.
        lose: lets them say that they are gone.
        release: lets them say where they lie.
    """

    bring: Callable[[], object]
    lose: Callable[[RunEnding, BaseException], object]
    release: Callable[[], object]


class Leaving:
    """Leaves one session.

    Args:
        session: whose.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._has_left = False
        self._is_given = False  # whether something is brought back and the run goes on
        self._pinned: list[Binding] = []
        self._capacities: dict[str, int] = {}  # that tiers had before they were made smaller

    def leave(
        self, choice: OnClose, ending: RunEnding, give_buffers_back: Callable[[], object]
    ) -> BaseException | None:
        """Bring everything back or release it, and leave nothing on the model and the optimizers.

        Where it is interrupted it may be called again, and goes on.

        Args:
            choice: which of the two.
            ending: that this is a part of.
            give_buffers_back: brings buffers back that `tierstore.training.suspension` has moved.

        Returns:
            Why the run stays open; ``None``: it does not.

        Raises:
            UsageError: it is to be released, and ``fully_shard`` has sharded the model.
        """
        if not self._has_left:
            if choice is OnClose.RELEASE:
                refuse_for_shards(self._session.model, "releasing it", "what is gathered has to be there")
            self._session.come_to_rest(ending)
            found = None if choice is not OnClose.AUTO else self.shortage()
            is_kept = choice is OnClose.RELEASE or found is not None
            if choice is not OnClose.RELEASE:
                failure = self._bring_shared_tables_back(choice, found)
                if failure is not None:
                    return failure
            if is_kept:
                self._release(ending, found)
            elif (failure := self._restore(ending)) is not None:
                return failure
            self._has_left = True
            self._session.forget_given()
            if not is_kept:
                ending.attempt(give_buffers_back)
                self._session.buffers.end(ending)
        self._session.end(ending)
        return None

    def _bring_shared_tables_back(self, choice: OnClose, found: Shortage | None) -> BaseException | None:
        """Bring tables back of which others have a part, with them; return why the run stays open.

        Args:
            choice: what this process does.
            found: what does not fit, beside tables; then it does not bring them back, and says so later.
        """

        def fits(nbytes: int) -> bool:
            if choice is OnClose.RESTORE or found is not None:
                return found is None
            more = [Need(torch.device("cpu"), _BLOCK_BYTES)] * -(-nbytes // _BLOCK_BYTES)
            return shortage(self._session.store, [*self._needs(), *more]) is None

        tables = self._session.tables
        try:
            why = tables.bring_shared_back(fits)
        except Exception as error:  # noqa: BLE001 - of whatever part; nothing is lost
            return self._stay_open([error])
        if found is None:
            tables.division.say_released(list(tables.attached().values()), why, self._what_is_kept)
        return None

    def _parts(self) -> Iterator[_LeavingKey]:
        """Yield what is in the store: parameters first, then the optimizers' state, then gradients."""
        adopter, gradients = self._session.adopter, self._session.gradients
        for binding in adopter.adopted(self._session.bundles):
            yield _LeavingKey(
                functools.partial(self._bring, binding),
                functools.partial(adopter.lose, binding),
                functools.partial(adopter.release, binding, self._where_is),
            )
        for gradient in gradients.stashed():
            yield _LeavingKey(
                functools.partial(self._bring_gradient, gradient),
                functools.partial(gradients.lose, gradient),
                functools.partial(gradients.release, gradient, _where_no_gradient_is),
            )
        tables = self._session.tables
        for weight, name in tables.attached().items():
            where = self._where_table_is(name)
            yield _LeavingKey(
                functools.partial(tables.bring_back, weight, where),
                functools.partial(self._lose_table, weight, name),
                functools.partial(tables.release, weight, where),
            )

    # --- back ---------------------------------------------------------------------------------

    def _bring(self, binding: Binding) -> None:
        """Bring a bundle back, and with parameters their gradients: who has no guard has no others."""
        adopter, gradients = self._session.adopter, self._session.gradients
        origins = adopter.origins_of(binding) if adopter.has(binding) else {}
        fetched = []
        for parameter in binding.tensors:
            gradients.note_change(parameter)  # steps that were made ahead of it are worth nothing
            gradient = gradients.table.find(parameter)
            if gradient is not None and gradient.binding is not None:
                device = origins.get(parameter, parameter.device)
                with contextlib.suppress(*_GONE):  # it has a part of its own, and is lost with that
                    fetched.append((gradient, gradients.fetch(gradient, _in_the_end(device))))
        adopter.bring_back(binding)
        for gradient, values in fetched:
            gradients.bring_back(gradient, values)

    def _bring_gradient(self, gradient: Gradient) -> None:
        gradients = self._session.gradients
        gradients.bring_back(gradient, gradients.fetch(gradient, gradient.parameter.device))

    def _restore(self, ending: RunEnding) -> BaseException | None:
        """Bring everything back; return why something is in the store still."""
        self._pinned += [each for each in self._session.bindings.pinned if each not in self._pinned]
        self._is_given = True
        ending.attempt(self._session.adopter.note_parts_abroad)
        parts = list(self._parts())
        gone: list[tuple[_LeavingKey, BaseException]] = []
        stays: list[BaseException] = []
        for part in progress(parts, [1] * len(parts), "restoring", "bundles"):
            failure = ending.attempt(part.bring)
            if failure is None:
                self._shrink()
            elif isinstance(failure, _GONE):
                gone.append((part, failure))
            else:
                stays.append(failure)
            if ending.interrupts > _MOST_INTERRUPTS and part is not parts[-1]:
                stays += ending.take_causes()
                break
            if stays and is_of_memory(stays[-1]):
                break
        if not stays:
            for part, failure in gone:
                ending.attempt(functools.partial(part.lose, ending, failure))
            return None
        return self._stay_open(list(dict.fromkeys([*ending.take_causes(), *stays])))

    def _shrink(self) -> None:
        """Let tiers in host memory give back what has left them."""
        store = self._session.store
        tiers = store.stats().tiers
        for name in host_tiers(store):
            tier = tiers[name]
            if (
                tier.reserved_bytes - tier.charged_bytes >= _SHRINK_BYTES
                and tier.charged_bytes < tier.capacity_bytes
            ):
                self._capacities.setdefault(name, tier.capacity_bytes)
                with contextlib.suppress(TierStoreError):  # less is given back then
                    store.resize(name, tier.charged_bytes)

    def _stay_open(self, causes: list[BaseException]) -> BaseException:
        """The run goes on: give it the room that it had; return what to raise."""
        for cause in causes:
            _let_memory_go(cause)
        self._regrow()
        failure = next((each for each in causes if not isinstance(each, Exception)), causes[0])
        if any(map(is_of_memory, causes)):
            try:
                self._take_back()
            except Exception as error:  # noqa: BLE001 - it stays as it is, and is taken back when the run goes on
                _let_memory_go(error)
                log.warning("what was brought back stays in memory for now: %s", error)
        left = sum(1 for _ in self._parts())
        failure.add_note(
            f"The run stays open: {left} bundles and gradients are in the store still, and nothing is lost. "
            "Everything can be used and saved with run.save(path). Then close it again: run.close(), "
            "run.close(restore=True), or run.close(restore=False), which leaves the rest where it lies."
        )
        return failure

    def _regrow(self) -> None:
        store = self._session.store
        while self._capacities:
            name, capacity_bytes = next(iter(self._capacities.items()))
            store.resize(name, capacity_bytes)
            del self._capacities[name]

    def go_on(self) -> None:
        """The run is used after it could not be left: take back what was brought back.  Blocks.

        Raises:
            CapacityError: no tier has room for it.
            BackendError: a medium failed.
        """
        if self._is_given and not self._has_left:
            self._take_back()

    def _take_back(self) -> None:
        """Take back as much as there is room for, as often as that makes room for more.

        Raises:
            Exception: why something stays in memory.
        """
        session = self._session
        failure: Exception | None = None
        while given := session.adopter.given:
            failure = None
            for binding in given:
                try:
                    session.adopter.take_back(binding)
                except Exception as error:  # noqa: BLE001 - raised below, if nothing else makes room for it
                    _let_memory_go(error)
                    failure = error
            if len(session.adopter.given) == len(given):
                break
        try:
            if failure is not None:
                raise failure
        finally:
            failure = None
        session.gradients.take_back()
        session.tables.take_in(session.bindings.leasing)
        self._pin_again()
        self._is_given = False

    def _pin_again(self) -> None:
        bindings = self._session.bindings
        if bindings.leasing.state is LeasingState.ALLOWED:
            for binding in self._pinned:
                if binding not in bindings.pinned:
                    pin(bindings, binding)
        self._pinned.clear()

    # --- where it lies --------------------------------------------------------------------------

    def _release(self, ending: RunEnding, found: Shortage | None) -> None:
        """Let everything that is in the store be placeholders; say so, if nobody has asked for it."""
        nbytes = sum(need.nbytes for need in self._needs())
        for part in self._parts():
            ending.attempt(part.release)
        if found is not None:
            log.warning(
                "the run is closed, and %s of parameters, gradients and optimizer state are released, as "
                "they do not fit into memory with room to spare: %s. %s Using them raises StoreClosed. "
                "run.close(restore=True) or offload(..., on_close='restore') brings them back whatever is "
                "available.",
                format_bytes(nbytes),
                found,
                self._what_is_kept(),
            )

    def _what_is_kept(self) -> str:
        durable = self._session.durable
        if durable is None:
            return (
                "They are gone: the tiers were scratch space. Next time save them with run.save(path) before "
                "the run ends, or set durable=True."
            )
        if not durable.kept:
            return "They are gone: no run.checkpoint() was made."
        return (
            f"{durable.directory} has them as run.checkpoint() number {durable.checkpoints} left them: "
            "offload(model, optimizer, config) with this offload_path goes on from there."
        )

    def _where_is(self, place: TensorLayout) -> str:
        durable = self._session.durable
        begin = f"{place.name!r} was released when its run was closed, and "
        if durable is not None and place.name in durable.kept:
            return (
                f"{begin}its bytes are in {durable.directory} under the key {durable.kept[place.name]!r}, as "
                f"run.checkpoint() number {durable.checkpoints} left them. offload(model, optimizer, config) "
                "with this offload_path goes on from there; or give it other values with p.data = values."
            )
        if durable is None:
            why = "the run's tiers were scratch space"
        elif durable.kept:
            why = "the last run.checkpoint() does not have them"
        else:
            why = "no run.checkpoint() was made"
        return (
            f"{begin}its bytes are gone: {why}. Load it again, or give it other values with p.data = values."
        )

    def _lose_table(self, weight: TableWeight, name: str, ending: RunEnding, cause: BaseException) -> None:
        del ending
        self._session.tables.release(weight, f"the rows of {name!r} are gone: {cause}")

    def _where_table_is(self, name: str) -> str:
        durable = self._session.durable
        parts = self._session.tables.division.said_of_parts
        begin = f"the table {name!r} was released when its run was closed, and{parts}"
        if durable is not None and name in durable.kept:
            return (
                f"{begin} its rows are in {durable.directory}, as run.checkpoint() number "
                f"{durable.checkpoints} left them. offload(model, optimizer, config) with this offload_path "
                "goes on from there."
            )
        why = "the run's tiers were scratch space" if durable is None else "no run.checkpoint() has them"
        return f"{begin} its rows are gone: {why}."

    # --- whether it fits ------------------------------------------------------------------------

    def shortage(self) -> Shortage | None:
        """Return what does not fit if everything is brought back; ``None``: it does."""
        return shortage(self._session.store, self._needs())

    def _needs(self) -> Iterator[Need]:
        adopter = self._session.adopter
        for binding in adopter.adopted(self._session.bundles):
            yield from needs_of_bundle(binding, adopter.origins_of(binding).values())
        origins = adopter.origins()
        for gradient in self._session.gradients.stashed():
            assert gradient.binding is not None
            device = origins.get(gradient.parameter, torch.device("cpu"))
            yield Need(_in_the_end(device), gradient.binding.nbytes)
        for weight in self._session.tables.coming_back():
            yield Need(torch.device("cpu"), self._session.tables.needed_bytes(weight))


def _in_the_end(origin: torch.device) -> torch.device:
    """Return where something goes that was there before: what had no memory gets the host's."""
    return torch.device("cpu") if origin.type == "meta" else origin


def _where_no_gradient_is(name: str) -> str:
    return (
        f"{name} was released when its run was closed, and its bytes are gone: a gradient is no part of a "
        "checkpoint. Run backward again, or clear it with optimizer.zero_grad()."
    )


def is_of_memory(failure: BaseException) -> bool:
    """Whether there was no memory, on whatever device, for what has failed, or for what that is caused by."""
    seen: BaseException | None = failure
    while seen is not None:  # not by what else was being handled, which may be the program's own
        if isinstance(seen, MemoryError) or (isinstance(seen, OSError) and seen.errno == errno.ENOMEM):
            return True
        text = str(seen).lower()
        if isinstance(seen, RuntimeError) and ("out of memory" in text or "allocate memory" in text):
            return True
        seen = seen.__cause__
    return False


def _let_memory_go(failure: BaseException) -> None:
    """Free what the frames of an error refer to: bytes that were half brought back."""
    seen: BaseException | None = failure
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen = seen.__cause__
