"""What one step of a program does, as data: `Program`.

1. Time passes in *moments*: what happens between two questions to the store.  A moment opens the windows of
   its `KeyUse`s in order, computes, makes and ends what it says, and closes the windows that end with it.
2. A *datum* is what a store has one key for, or could have.  Activations are data, too: as long as no mark
   moves them they are the program's own bytes from their ``MAKE`` to their ``END``.
3. The moments are those of one step in the middle of a run.  State exists then; a run's first step makes it.
4. What nobody measured is 0 and is said in ``assumptions``; `tierstore.planning.roofline` fills in durations.

A program knows nothing of tiers or of machines: it is the same on all of them.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from tierstore.planning.homes import is_name
from tierstore.planning.wrong_values import WrongValues
from tierstore.quoting import quoted

PROGRAM_VERSION = 1

_LARGEST = 2**63 - 1


class ByteKind(enum.Enum):
    """What bytes are to the program."""

    PARAMETERS = "parameters"
    GRADIENT = "gradient"
    STATE = "state"  # an optimizer's
    BUFFER = "buffer"
    ACTIVATION = "activation"
    INPUT = "input"
    WORKSPACE = "workspace"  # of operators, while they run

    __hash__ = object.__hash__  # an enum's own is a call into Python, for every use


class Phase(enum.Enum):
    """What a step does at a time."""

    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    BETWEEN = "between"  # inputs are made, gradients are zeroed

    __hash__ = object.__hash__  # as above


class Does(enum.Enum):
    """What a moment does with a datum."""

    READ = "read"
    WRITE = "write"  # reads and changes
    MAKE = "make"  # it comes to be
    END = "end"  # nobody needs it any more

    __hash__ = object.__hash__  # as above


@dataclass(frozen=True, slots=True)
class Datum:
    """One key's bytes.

    Attributes:
        key: its name in the store.
        nbytes: of it, in the store.
        kind: what it is.
        owner: the key of the bundle of parameters that a gradient or state belongs to.
        layer: the number of the layer that made it, among repeated ones; ``None``: of none.
        operator: of activations, the path that marks match.
    """

    key: str
    nbytes: int
    kind: ByteKind
    owner: str | None = None
    layer: int | None = None
    operator: str = ""

    def __post_init__(self) -> None:
        faults = WrongValues()
        faults.add_unless(is_name(self.key), "key", self.key, "a name")
        faults.add_unless(is_bytes(self.nbytes), "nbytes", self.nbytes, BYTES_LISTED)
        faults.add_unless(isinstance(self.kind, ByteKind), "kind", self.kind, "a ByteKind")
        faults.raise_if_any("Datum")


@dataclass(frozen=True, slots=True)
class KeyUse:
    """What a moment does with one key.

    Attributes:
        key: of a datum.
        does: what.
        moments: for how many moments its window stays open, this one included; a parent's over its
            children's.
    """

    key: str
    does: Does
    moments: int = 1


@dataclass(frozen=True, slots=True)
class OperatorWork:
    """What operators of one sort do in a moment: what a roofline needs.

    Attributes:
        sort: ``"matmul"``, ``"attention"``, ``"convolution"`` or ``"other"``: efficiencies are by this name.
        dtype: of the operands, as ``"bfloat16"``.
        flops: floating-point operations.
        moved_bytes: that the operators read and write in device memory.
        operators: how many.
    """

    sort: str
    dtype: str
    flops: float
    moved_bytes: int
    operators: int = 1

    def __post_init__(self) -> None:
        faults = WrongValues()
        faults.add_unless(is_figure(self.flops), "flops", self.flops, FIGURE_LISTED)
        faults.add_unless(is_bytes(self.moved_bytes), "moved_bytes", self.moved_bytes, BYTES_LISTED)
        faults.add_unless(is_bytes(self.operators), "operators", self.operators, "an int of at least 0")
        faults.raise_if_any("OperatorWork")


@dataclass(frozen=True, slots=True)
class Moment:
    """What happens between two questions to the store.

    Attributes:
        phase: of the step.
        name: the module, or the optimizer and what it steps.
        uses: in the order in which they are opened; ``MAKE`` and ``END`` take effect when it has computed.
        compute_s: seconds that the device computes.
        host_s: seconds of the host's own before it: Python, hooks, the store's bookkeeping.  Where the
            "device" computes with the host's cores they come one after the other.
        work: for a roofline; empty where ``compute_s`` was measured.
        workspace_bytes: what operators take and give back inside, at most, beside what lives before
            and after.
        live_bytes: the program's own bytes on the device when it begins that are no datum.
        layer: as `Datum.layer`.
        nodes: of the autograd graph that it makes: what distances in the backward graph count.
    """

    phase: Phase
    name: str
    uses: tuple[KeyUse, ...] = ()
    compute_s: float = 0.0
    host_s: float = 0.0
    work: tuple[OperatorWork, ...] = ()
    workspace_bytes: int = 0
    live_bytes: int = 0
    layer: int | None = None
    nodes: int = 0

    def __post_init__(self) -> None:
        faults = WrongValues()
        for name in ("compute_s", "host_s"):
            faults.add_unless(is_figure(getattr(self, name)), name, getattr(self, name), FIGURE_LISTED)
        for name in ("workspace_bytes", "live_bytes", "nodes"):
            faults.add_unless(is_bytes(getattr(self, name)), name, getattr(self, name), BYTES_LISTED)
        for use in self.uses:
            faults.add_unless(
                is_bytes(use.moments) and use.moments >= 1,
                "moments",
                use.moments,
                "an int of at least 1",
            )
        faults.raise_if_any(f"Moment {quoted(self.name)}")


@dataclass(frozen=True, slots=True)
class Unit:
    """What one turn of an optimizer steps.

    Attributes:
        optimizer: its name.
        bundle: the key of the parameters.
        state: the key of what it keeps for them; ``None``: it keeps nothing.
        gradients: keys, in the order of the parameters, as the step opens them.
        device_step_s: seconds of the step on the device.
        host_step_s: on the host; ``None``: it cannot be stepped there.
        may_step_ahead: whether backward may step it into a copy beside it.
    """

    optimizer: str
    bundle: str
    state: str | None
    gradients: tuple[str, ...]
    device_step_s: float = 0.0
    host_step_s: float | None = None
    may_step_ahead: bool = False


@dataclass(frozen=True)
class Program:
    """What one step does.

    Attributes:
        name: for people.
        source: ``"trace"`` (a run was watched), ``"model"`` (computed from a model that is nowhere) or
            ``"hand"``.
        data: by key.
        moments: in order.
        units: what optimizers step, in their order.
        standing_bytes: on the device all the time: parameters that are not the store's, inputs that stay.
        accumulations: backward passes for each optimizer step; ``moments`` hold all of them.
        facts: what it was made with: model, batch, sequence, dtype, versions.
        assumptions: sentences about what was not known.
        fingerprint: of names and sizes of parameters and buffers: of one model it is always the same.

    Raises:
        ConfigError: lists every fault: a use of an unknown key, one use before its ``MAKE``, a figure that is
            negative or none.
    """

    name: str
    source: str
    data: Mapping[str, Datum]
    moments: tuple[Moment, ...]
    units: tuple[Unit, ...] = ()
    standing_bytes: int = 0
    accumulations: int = 1
    facts: Mapping[str, str] = field(default_factory=dict)
    assumptions: tuple[str, ...] = ()
    fingerprint: str = ""

    def __post_init__(self) -> None:
        faults = WrongValues()
        faults.add_unless(is_bytes(self.standing_bytes), "standing_bytes", self.standing_bytes, BYTES_LISTED)
        faults.add_unless(
            is_bytes(self.accumulations) and self.accumulations >= 1,
            "accumulations",
            self.accumulations,
            "an int of at least 1",
        )
        for key, datum in self.data.items():
            faults.add_unless(
                datum.key == key, f"data[{quoted(key)}].key", datum.key, "the key that it is under"
            )
        self._check_uses(faults)
        for unit in self.units:
            keys = (unit.bundle, *unit.gradients, *([] if unit.state is None else [unit.state]))
            for key in keys:
                faults.add_unless(key in self.data, f"units[{quoted(unit.bundle)}]", key, "a key of the data")
        faults.raise_if_any(f"Program {quoted(self.name)}")

    def _check_uses(self, faults: WrongValues) -> None:
        """Note uses of what is not there: not yet made, ended already, or unknown."""
        made = {use.key for moment in self.moments for use in moment.uses if use.does is Does.MAKE}
        absent = set(made)
        for number, moment in enumerate(self.moments):
            for use in moment.uses:
                where = f"moments[{number}]"
                faults.add_unless(use.key in self.data, where, use.key, "a key of the data")
                if use.does is Does.MAKE:
                    absent.discard(use.key)
                else:
                    faults.add_unless(
                        use.key not in absent,
                        where,
                        use.key,
                        "a key that exists: it is not made yet, or has ended",
                    )
                if use.does is Does.END:
                    absent.add(use.key)

    @property
    def compute_s(self) -> float:
        """Seconds that the device computes in one step; no step is shorter."""
        return math.fsum(moment.compute_s for moment in self.moments)


def is_figure(value: object) -> bool:
    """Whether something is a finite number of at least 0."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 <= value <= _LARGEST  # type: ignore[operator]  # NaN and inf are not


def is_bytes(value: object) -> bool:
    """Whether something is an int of at least 0 that fits into 63 bits."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _LARGEST


FIGURE_LISTED = "a finite number of at least 0"
BYTES_LISTED = "an int of at least 0 and less than 2**63"
