"""The moments of a step, in the making: what each does with which data, and what it needs beside them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from tierstore.planning import ByteKind, Datum, Does, KeyUse, Moment, OperatorWork, Phase
from tierstore.torch_private import next_sequence_number
from tierstore.training.tracing.storages import MetaStorages, Sort


@dataclass(slots=True)
class OpenUse:
    """A use whose window may still be open.

    Attributes:
        key: of what.
        does: what.
        begin: the number of its moment.
        moments: for how many its window was open.
    """

    key: str
    does: Does
    begin: int
    moments: int = 1


@dataclass(slots=True)
class _SumOfWork:
    flops: float = 0.0
    moved_bytes: int = 0
    operators: int = 0


@dataclass(slots=True)
class _OpenMoment:
    phase: Phase
    name: str
    layer: int | None
    live_bytes: int
    begin_bytes: int
    node: int
    uses: list[OpenUse] = field(default_factory=list)
    work: dict[tuple[str, str], _SumOfWork] = field(default_factory=dict)
    operators: int = 0


class MomentLog:
    """Moments, in their order; one is always open while it is not paused.

    Attributes:
        storages: what is live.
        data: activations and gradients that were made, by key.
        most_bytes: the most that was live at once, of all sorts, in the moments so far.
        layer: the number of the layer that runs; ``None``: none does.
        phase: of the step.
    """

    def __init__(self) -> None:
        self.storages = MetaStorages(self.end)
        self.data: dict[str, Datum] = {}
        self.layer: int | None = None
        self.phase = Phase.FORWARD
        self.most_bytes = 0
        self._made = 0
        self._done: list[tuple[_OpenMoment, int, int]] = []
        self._open: _OpenMoment | None = None
        self._ended_between: list[str] = []

    # ------------------------------------------------------------------ moments

    @property
    def has_begun(self) -> bool:
        """Whether the open moment has done anything."""
        return self._open is not None and bool(self._open.operators or self._open.uses)

    def begin(self, name: str) -> None:
        """Begin a moment, in the phase and the layer that are now; one that did nothing makes way for it."""
        self.finish()
        storages = self.storages
        self._open = _OpenMoment(
            self.phase,
            name,
            self.layer,
            storages.own_bytes,
            storages.total_bytes,
            next_sequence_number(),
        )
        storages.begin_peak()
        while self._ended_between:
            self.use(self._ended_between.pop(0), Does.END)

    @property
    def number(self) -> int:
        """Of the open moment, for `repeat`."""
        return len(self._done)

    def repeat(self, number: int) -> None:
        """Let the open moment, with no operators yet, do what an earlier one did that left nothing behind."""
        moment = self._open
        if moment is not None:
            earlier, workspace_bytes, _ = self._done[number]
            moment.work = {sort: replace(work) for sort, work in earlier.work.items()}
            moment.operators = earlier.operators
            self.storages.note_peak(moment.begin_bytes + workspace_bytes)

    def finish(self) -> None:
        """End the open moment."""
        last = self._open
        if last is not None and (last.operators or last.uses):
            workspace_bytes = max(0, self.storages.peak_bytes - last.begin_bytes)
            self._done.append((last, workspace_bytes, next_sequence_number() - last.node))
            self.most_bytes = max(self.most_bytes, self.storages.peak_bytes)
        self._open = None

    def moments(self) -> tuple[Moment, ...]:
        """Return the moments that have ended."""
        return tuple(
            Moment(
                phase=each.phase,
                name=each.name,
                uses=tuple(KeyUse(use.key, use.does, use.moments) for use in each.uses),
                work=tuple(
                    OperatorWork(sort, dtype, work.flops, work.moved_bytes, work.operators)
                    for (sort, dtype), work in each.work.items()
                ),
                workspace_bytes=workspace_bytes,
                live_bytes=each.live_bytes,
                layer=each.layer,
                nodes=nodes if each.phase is Phase.FORWARD else 0,
            )
            for each, workspace_bytes, nodes in self._done
        )

    # ------------------------------------------------------------------ what happens in one

    def use(self, key: str, does: Does) -> OpenUse:
        """Note a use of a key; returns it, for `close`."""
        use = OpenUse(key, does, len(self._done))
        if self._open is not None:
            self._open.uses.append(use)
        return use

    def is_used(self, key: str) -> bool:
        """Whether the open moment uses a key already."""
        return self._open is not None and any(use.key == key for use in self._open.uses)

    def close(self, use: OpenUse) -> None:
        """Let a window end with the open moment, or with the one before, if that has done nothing."""
        use.moments = max(1, len(self._done) - use.begin + (1 if self.has_begun else 0))

    def count(self, sort: str, dtype: str, flops: float, moved_bytes: int) -> None:
        """Note what an operator did."""
        moment = self._open
        if moment is not None:
            work = moment.work.setdefault((sort, dtype), _SumOfWork())
            work.flops += flops
            work.moved_bytes += moved_bytes
            work.operators += 1
            moment.operators += 1

    # ------------------------------------------------------------------ activations

    def make_activation(self, nbytes: int, operator: str) -> str:
        """Note that autograd has saved memory that it had not; returns its key."""
        key = f"activation/{self._made}"
        self._made += 1
        self.data[key] = Datum(key, nbytes, ByteKind.ACTIVATION, layer=self.layer, operator=operator)
        self.use(key, Does.MAKE)
        return key

    def read_activation(self, key: str) -> None:
        """Note that backward needs it; what is of another layer than before begins a moment."""
        layer = self.data[key].layer
        if self.phase is Phase.BACKWARD and layer != self.layer:
            self.layer = layer
            self.begin(f"backward of {self.data[key].operator}")
        self._use_once(key, Does.READ)

    def end(self, key: str) -> None:
        """Note that an activation's memory has died; one of a single moment is workspace of that.

        It may die between moments, as garbage is collected anywhere: it ends in the next one.
        """
        if self._open is None:
            self._ended_between.append(key)
            return
        uses = self._open.uses
        if any(use.key == key and use.does is Does.MAKE for use in uses):
            uses[:] = [use for use in uses if use.key != key]
            del self.data[key]
        else:
            self.use(key, Does.END)

    def make_gradient(self, gradient: torch.Tensor, key: str, owner: str) -> None:
        """Note that a gradient was made, or added to.

        Each has a moment, as in a run: what is live beside it then counts, which one node of the graph has
        made for others.
        """
        is_new = key not in self.data
        nbytes = gradient.numel() * gradient.element_size()
        self.storages.add(gradient, Sort.GRADIENT, key)
        self.data.setdefault(key, Datum(key, nbytes, ByteKind.GRADIENT, owner=owner))
        if is_new and self._open is not None:
            self._measure_anew(self._open)
        self.use(key, Does.MAKE if is_new else Does.WRITE)

    def _measure_anew(self, moment: _OpenMoment) -> None:
        """Let a moment that makes a gradient have what is live now; what it had more, it works with."""
        if any(use.does is Does.MAKE and self.data[use.key].kind is ByteKind.GRADIENT for use in moment.uses):
            self.begin(moment.name)
            return
        more_bytes = self.storages.own_bytes - moment.live_bytes
        moment.live_bytes += more_bytes
        moment.begin_bytes += more_bytes

    def _use_once(self, key: str, does: Does) -> None:
        if not self.is_used(key):
            self.use(key, does)
