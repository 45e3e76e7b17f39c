"""Programs in JSON that cannot be, and one that is right."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tierstore.planning import (
    ByteKind,
    Datum,
    Does,
    KeyUse,
    Moment,
    OperatorWork,
    Phase,
    Program,
    Unit,
)
from tierstore.planning.program_text import program_to_mapping

PROGRAM = Program(
    name="two layers",
    source="hand",
    data={
        "a.w": Datum("a.w", 4096, ByteKind.PARAMETERS, layer=0),
        "a.x": Datum("a.x", 1024, ByteKind.ACTIVATION, layer=0, operator="layers.0.linear"),
        "a.g": Datum("a.g", 4096, ByteKind.GRADIENT, owner="a.w"),
        "a.s": Datum("a.s", 8192, ByteKind.STATE, owner="a.w"),
    },
    moments=(
        Moment(
            Phase.FORWARD,
            "layers.0",
            (KeyUse("a.w", Does.READ), KeyUse("a.x", Does.MAKE)),
            0.25,
            work=(OperatorWork("matmul", "bfloat16", 2.0e12, 5120),),
            layer=0,
        ),
        Moment(Phase.BACKWARD, "layers.0", (KeyUse("a.x", Does.END), KeyUse("a.g", Does.MAKE)), 0.5, 0.125),
        Moment(Phase.OPTIMIZER, "adamw: a.w", (KeyUse("a.w", Does.WRITE, 1), KeyUse("a.g", Does.END))),
    ),
    units=(Unit("adamw", "a.w", "a.s", ("a.g",), 0.01, 0.1, may_step_ahead=True),),
    standing_bytes=100,
    facts={"torch": "2.13"},
    assumptions=("the mask is true",),
)
"""What a step of one layer does."""


def _with(*path_and_value: object) -> str:
    """Return the program's JSON with another value somewhere."""
    *path, last, value = path_and_value
    document: Any = program_to_mapping(PROGRAM)
    inner = document
    for name in path:
        inner = inner[name]
    inner[last] = value
    return json.dumps(document)


def _number(text: str) -> int:
    """Return the number of one of the program's texts."""
    document: Any = program_to_mapping(PROGRAM)
    return int(document["texts"].index(text))


PROGRAMS: Mapping[str, tuple[str, str]] = {
    "nothing": ("", "no JSON"),
    "half": ('{"version": 1', "no JSON"),
    "deep": ("[" * 100_000, "nests too deep"),
    "a key twice": ('{"version": 1, "version": 2}', "'version' is given twice"),
    "a list": ("[]", "accepted: a mapping"),
    "no version": ("{}", "version none; this tierstore reads version 1"),
    "a later one": (_with("version", 2), "version 2; this tierstore reads version 1"),
    "a version with a point": (_with("version", 1.5), "this tierstore reads version 1"),
    "a true version": (_with("version", not 0), "version True"),
    "a long version": (_with("version", "x" * 100_000), "this tierstore reads version 1"),
    "no texts": (_with("texts", []), "below 0"),
    "texts that are none": (_with("texts", [1]), "texts"),
    "no number": (_with("moments", "compute_s", 0, float("nan")), "moments.compute_s[0]=nan"),
    "a negative figure": (_with("moments", "host_s", 1, -1), "moments.host_s[1]=-1"),
    "an infinite figure": (_with("work", "flops", 0, float("inf")), "work.flops[0]=inf"),
    "an absurd figure": (_with("work", "flops", 0, 1e300), "work.flops[0]=1e+300"),
    "half a byte": (_with("data", "nbytes", 0, 0.5), "data.nbytes[0]=0.5"),
    "2**63 bytes": (_with("data", "nbytes", 3, 2**63), "less than 2**63"),
    "a short column": (_with("data", "kind", [1]), "accepted: 4, as the columns before it"),
    "no column": (_with("data", "layer", None), "data.layer=None: accepted: a list"),
    "a number of no text": (_with("uses", "key", 0, 99), "uses.key[0]=99"),
    "a kind that is a phase": (_with("data", "kind", 0, _number("forward")), "data.kind[0]"),
    "more uses than there are": (_with("moments", "uses", 0, 3), "sum(program.moments.uses)=7"),
    "fewer uses than there are": (_with("moments", "uses", 0, 0), "sum(program.moments.uses)=4"),
    "a window of no moments": (_with("uses", "moments", 0, 0), "uses.moments[0]=0"),
    "a key twice in the data": (_with("data", "key", [0, 0, 0, 0]), "each key once"),
    "a use after the end": (_with("uses", "does", 1, _number("end")), "is not made yet, or has ended"),
    "no accumulations": (_with("accumulations", 0), "accumulations=0"),
    "facts that are a list": (_with("facts", []), "facts=[]"),
    "a huge name": (_with("name", "x" * 1_000_000), ""),
}
"""By name: a text, and what the refusal says; nothing: it is read, or refused for any reason."""
