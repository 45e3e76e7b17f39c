"""What a run tells while its steps are recorded: one mark for each thing that happens, with its time.

Plain data; of tensors and bindings only names and sizes are kept, and of an accelerator events
until they have passed.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from tierstore.planning.program import ByteKind
from tierstore.recorded import Recording
from tierstore.training.recording.device_clock import DevicePoint


class Sign(enum.Enum):
    """What happens."""

    ASK = enum.auto()  # somebody is about to ask the store for bytes to use
    USE = enum.auto()  # bytes are used from now on: they are held
    PUT = enum.auto()  # a gradient is about to become the store's
    LANDED = enum.auto()  # a gradient is whole, whoever's it is
    FORWARD = enum.auto()  # the model begins to run
    BACKWARD = enum.auto()  # it has run: what comes now is a loss and backward passes
    OPTIMIZER = enum.auto()  # optimizers step
    BETWEEN = enum.auto()  # they have stepped
    EVALUATION = enum.auto()  # the model begins to run for itself
    EVALUATED = enum.auto()  # it has
    AHEAD = enum.auto()  # what comes now belongs to a later step of an optimizer
    TOLD = enum.auto()  # and it has ended
    STEP = enum.auto()  # an optimizer begins to step one bundle
    STEPPED = enum.auto()  # it has
    TAKEN = enum.auto()  # a step that was made ahead counts from now on


@dataclass(frozen=True, slots=True)
class BundleStep:
    """What an optimizer steps at once.

    Attributes:
        optimizer: its name.
        bundle: the key of the parameters.
        state: the key of what it keeps for them; ``None``: there is nothing.
        gradients: keys and bytes of those that are in the store.
        is_on_host: whether it is made with the host's cores, as those of an emulated device are.
        may_be_ahead: whether it could be made during backward, if there were room.
    """

    optimizer: str
    bundle: str
    state: str | None
    gradients: tuple[tuple[str, int], ...]
    is_on_host: bool
    may_be_ahead: bool


@dataclass(frozen=True, slots=True)
class RunMark:
    """One thing that happens.

    Attributes:
        at_s: when, by ``time.perf_counter()``.
        sign: what.
        thread: where, as ``threading.get_ident()`` says.
        key, nbytes: of what is used or made.
        owner: the bundle that a gradient belongs to.
        step: of the signs of an optimizer's steps.
        live_bytes: what the program has on the device beside the store; ``None``: nobody measures.
        peak_bytes: the most of these since the mark before; ``None``: it is not known.
    """

    at_s: float
    sign: Sign
    thread: int
    key: str = ""
    nbytes: int = 0
    owner: str | None = None
    step: BundleStep | None = None
    live_bytes: int | None = None
    peak_bytes: int | None = None


@dataclass(slots=True)
class RecordedStep:
    """One step: from one begin of the model's use to that of the next step's.

    Attributes:
        number: of the run's steps, from 1.
        begin_s, end_s: when.
        marks: in order.
        fault: why it is no whole step; ``""``: it is.
        inputs: shapes and dtypes of what the model was given, as text.
        points: in what an accelerator does, in order; ``None``: it has refused one.
    """

    number: int
    begin_s: float
    end_s: float
    marks: list[RunMark] = field(default_factory=list)
    fault: str = ""
    inputs: str = ""
    points: list[DevicePoint] | None = field(default_factory=list)

    @property
    def is_timed(self) -> bool:
        """Whether it is known when an accelerator came to each point."""
        return bool(self.points) and all(each.reached_s is not None for each in self.points or ())

    def add_point(self, point: DevicePoint | None) -> None:
        """Take in another point; without one it is not known what the device takes."""
        if point is None:
            self.points = None
        elif self.points is not None:
            self.points.append(point)


@dataclass(slots=True)
class RecordedSteps:
    """What was recorded of a run.

    Attributes:
        recording: what the store did meanwhile.
        steps: in order; the last one as far as it has come.
    """

    recording: Recording
    steps: list[RecordedStep] = field(default_factory=list)

    def begin_step(self, number: int, now: float) -> None:
        """Another step begins."""
        self.end_step(now)
        self.steps.append(RecordedStep(number, now, now))

    def end_step(self, now: float) -> None:
        """The step that is recorded ends; one in which the model was not used was none."""
        if self.steps:
            self.steps[-1].end_s = now
            if not any(mark.sign is Sign.FORWARD for mark in self.steps[-1].marks):
                del self.steps[-1]

    @property
    def whole(self) -> list[RecordedStep]:
        """The steps in whose midst no exception came."""
        return [step for step in self.steps if not step.fault]


@dataclass(frozen=True)
class RunFigures:
    """What is known of the keys of a run.

    Attributes:
        kinds: what the run's bundles are, and their bytes, by key.
        owners: by key of a gradient or of state, the bundle that it belongs to.
        layers: by key of a bundle, the number of the repeated layer that it is in.
    """

    kinds: Mapping[str, tuple[ByteKind, int]]
    owners: Mapping[str, str]
    layers: Mapping[str, int]

    def and_of(self, other: RunFigures) -> RunFigures:
        """Return what is known by both."""
        return RunFigures(
            {**self.kinds, **other.kinds}, {**self.owners, **other.owners}, {**self.layers, **other.layers}
        )
