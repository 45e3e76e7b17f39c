"""``tierstore plan MODEL``: will it fit, how fast will it be, and what should go where."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path

from tierstore.cli.finding import RunWish, find
from tierstore.cli.machines import machine_of
from tierstore.cli.plan_result import PlanResult, step_bound, to_mapping
from tierstore.cli.plan_text import bound_text, to_lines
from tierstore.cli.programs import DTYPES, ModelWish, program_of
from tierstore.cli.run_document import run_document, to_yaml
from tierstore.cli.seconds import format_seconds
from tierstore.cli.text_files import read_text, require_places, write_text
from tierstore.config import OffloadConfig, yaml_text
from tierstore.config.document import load
from tierstore.errors import ConfigError, UsageError
from tierstore.planning.chrome import TraceParts, trace_to_chrome
from tierstore.planning.rules import small_bytes
from tierstore.quoting import quoted
from tierstore.training.activations import Sections, read_sections, section_values
from tierstore.training.bundles.grouping import SMALL_BYTES
from tierstore.training.tracing import Grouping
from tierstore.units import parse_bytes

_FITS = 0
_DOES_NOT_FIT = 1
_COUNT_DIGITS = 10

WRITTEN_BY = "written by tierstore plan"
"""What the YAML of a run begins with."""


def add_to(
    verbs: argparse._SubParsersAction[argparse.ArgumentParser], shared: argparse.ArgumentParser
) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "plan",
        parents=[shared],
        help="will a model fit, how fast will it be, and what should go where",
        description="Predict a training step of a model on a machine, without either: whether it fits, "
        "peaks, bytes that move, seconds, what bounds it; and choose what goes where. Exit code 0: it fits, "
        "1: it does not, 2: the call is wrong.",
    )
    _add_program(parser)
    _add_machine(parser)
    _add_outputs(parser)
    parser.set_defaults(run=run)


def _add_program(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help="module:function that returns a model, (model, inputs) or (model, inputs, optimizer); or the "
        "config.json of a model of Hugging Face's",
    )
    parser.add_argument("--program", metavar="TRACE", help="a trace that a run recorded, instead of a model")
    parser.add_argument("--batch", type=_count, metavar="N", help="how many inputs a step has (default: 1)")
    parser.add_argument("--sequence", type=_count, metavar="N", help="how many tokens each input has")
    parser.add_argument("--dtype", choices=DTYPES, help="of parameters (default: as the model says)")
    parser.add_argument(
        "--optimizer",
        metavar="NAME",
        help="one of torch.optim's, momentum for SGD with it, or none (default: adamw)",
    )


def _add_machine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--machine",
        metavar="FILE|NAME",
        help="a machine.yaml, or a name of the sheet of accelerators (default: this machine, not measured)",
    )
    for option, what in (
        ("--max-device-memory", "all that the program may have on the device"),
        ("--max-host-memory", "quota of host memory"),
        ("--max-disk", "quota of disk; 0: there is none"),
    ):
        parser.add_argument(option, type=_size, metavar="SIZE", help=f"{what}, as 80GB")
    parser.add_argument("--config", metavar="FILE", help="a configuration that the run is to have (YAML)")
    parser.add_argument(
        "--placement",
        metavar="FILE",
        help="a placement (YAML) that is predicted as it is; none is looked for",
    )


def _add_outputs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--write", metavar="FILE", help="write the YAML for the run, which offload() takes")
    parser.add_argument("--trace", metavar="FILE", help="write what would happen when, for Perfetto")
    parser.add_argument("--json", action="store_true", help="one JSON object")


def run(options: argparse.Namespace) -> int:
    """Plan, print and write what is asked for.

    Raises:
        UsageError: the call is wrong, or what it names cannot be read, made or written.
    """
    require_places([each for each in (options.write, options.trace) if each is not None])
    wish = _wish(options)
    planned_for = machine_of(options.machine, wish.settings, _quotas(options))
    program = program_of(_model(options, wish.settings, planned_for.machine.tiers[0].capacity_bytes))
    result = find(program, planned_for.machine, wish, planned_for.remarks)
    _tell(result, is_json=options.json)
    _write(options, wish, result)
    return _FITS if result.fits else _DOES_NOT_FIT


def _tell(result: PlanResult, *, is_json: bool) -> None:
    if is_json:
        print(json.dumps(to_mapping(result), allow_nan=False, indent=2))
        return
    for line in to_lines(result):
        print(line)


def _write(options: argparse.Namespace, wish: RunWish, result: PlanResult) -> None:
    """Write what was asked for; of a program that does not fit there is nothing."""
    if result.timeline is None or result.placement is None:
        return
    if options.write is not None:
        document = run_document(wish.settings, result.machine, result.placement, _kept(options, wish, result))
        write_text(Path(options.write), to_yaml(document, _remarks(result)))
    if options.trace is not None:
        parts = TraceParts(result.timeline, result.program, result.machine, result.placement)
        write_text(Path(options.trace), trace_to_chrome(parts))


def _kept(options: argparse.Namespace, wish: RunWish, result: PlanResult) -> Mapping[str, object] | None:
    """Return the sections of the configuration if they still say what happens to activations."""
    given = () if result.placement is None else result.placement.marks
    if options.config is None or not given or given != wish.marks(result.program):
        return None
    return section_values(load(Path(options.config)))


def _remarks(result: PlanResult) -> list[str]:
    """Return what is said at the beginning of a run's YAML."""
    assert result.timeline is not None
    bound = bound_text(step_bound(result.timeline, result.machine))
    return [
        f"{WRITTEN_BY} for {result.program.name} on {result.machine.name}",
        f"predicted: {format_seconds(result.timeline.step_s)} a step; {bound}",
        *([result.why] if result.why else []),
        *(f"assumed: {each}" for each in result.assumptions),
    ]


# ------------------------------------------------------------------------------------ what was asked


def _wish(options: argparse.Namespace) -> RunWish:
    settings, sections = OffloadConfig(), Sections()
    if options.config is not None:
        settings, sections = OffloadConfig.from_yaml(options.config), read_sections(options.config)
    placement = None if options.placement is None else _placement(options.placement)
    return RunWish(settings, sections, placement)


def _placement(path: str) -> Mapping[str, object]:
    """Return the plain values of a placement: alone in its file, or in the configuration of a run."""
    given = yaml_text.parse(read_text(Path(path), yaml_text.MOST_BYTES), path)
    if not isinstance(given, Mapping):
        raise UsageError(f"{path}: {quoted(given)} is no placement; accepted: a mapping of its keys")
    if "offload_config" in given:
        given = OffloadConfig.from_document(given).placement or {}
    return given


def _model(options: argparse.Namespace, settings: OffloadConfig, fastest_bytes: int) -> ModelWish:
    smallest = settings.buffer_min_size
    return ModelWish(
        model=options.model,
        trace=options.program,
        batch=options.batch,
        sequence=options.sequence,
        dtype=options.dtype,
        optimizer=options.optimizer,
        grouping=Grouping(
            min(SMALL_BYTES, small_bytes(fastest_bytes)), None if smallest is None else parse_bytes(smallest)
        ),
    )


def _quotas(options: argparse.Namespace) -> dict[str, int]:
    given = {"device": options.max_device_memory, "host": options.max_host_memory, "disk": options.max_disk}
    return {tier: nbytes for tier, nbytes in given.items() if nbytes is not None}


def _count(text: str) -> int:
    if text.isascii() and text.isdecimal() and int(text[:_COUNT_DIGITS]) > 0 and len(text) < _COUNT_DIGITS:
        return int(text)
    raise argparse.ArgumentTypeError(f"{quoted(text)}; accepted: a whole number, 1 or more")


def _size(text: str) -> int:
    try:
        return parse_bytes(int(text) if text.isascii() and text.isdecimal() else text)
    except ConfigError as fault:
        raise argparse.ArgumentTypeError(str(fault)) from fault
