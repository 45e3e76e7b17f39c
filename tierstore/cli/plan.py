"""``tierstore plan MODEL``: will it fit, how fast will it be, and what should go where."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache

from tierstore.cli.comparing import compare_json, compare_table
from tierstore.cli.finding import RunWish, find, no_slower
from tierstore.cli.machines import RunMachine, machine_of, with_quotas
from tierstore.cli.plan_outputs import require_ours, write_pages, write_run, write_trace
from tierstore.cli.plan_ranks import add_ranks, host_of
from tierstore.cli.plan_result import PlanResult, to_mapping
from tierstore.cli.plan_text import to_lines
from tierstore.cli.plan_wishes import RULES, model_wish, quotas_of, run_wish, with_placement
from tierstore.cli.programs import DTYPES, ModelWish, program_of
from tierstore.cli.run_document import quota_keys
from tierstore.cli.sweep import Sweep, parse_sweep, sweep_json, sweep_table, swept, write_sweep_png
from tierstore.cli.text_files import require_places
from tierstore.errors import ConfigError, UsageError
from tierstore.planning import Program
from tierstore.quoting import quoted
from tierstore.units import parse_bytes

_FITS = 0
_DOES_NOT_FIT = 1
_COUNT_DIGITS = 10
_SIZE_DIGITS = 19
_TIER_OF = {"max_device_memory": "device", "offload_cpu_size": "host", "offload_disk_size": "disk"}


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
    add_ranks(parser, _count)
    parser.add_argument("--config", metavar="FILE", help="a configuration that the run is to have (YAML)")
    parser.add_argument(
        "--placement",
        metavar="FILE",
        help="a placement (YAML) that is predicted as it is; none is looked for",
    )


def _add_outputs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--compare",
        nargs=2,
        metavar=("A", "B"),
        help=f"put two placements side by side, each predicted as it is: files, or {RULES!r} for what is "
        "decided without a search",
    )
    parser.add_argument(
        "--sweep",
        metavar="QUOTA=LEAST..MOST",
        help="plan for several quotas, as max_device_memory=4GB..80GB:12",
    )
    parser.add_argument("--png", metavar="FILE", help="with --sweep: draw seconds against memory")
    parser.add_argument("--write", metavar="FILE", help="write the YAML for the run, which offload() takes")
    parser.add_argument(
        "--page", metavar="FILE", help="write a page of HTML that shows what would happen when"
    )
    parser.add_argument("--trace", metavar="FILE", help="write that as a trace, for Perfetto and --program")
    parser.add_argument("--json", action="store_true", help="one JSON object")


def run(options: argparse.Namespace) -> int:
    """Plan, print and write what is asked for.

    Raises:
        UsageError: the call is wrong, or what it names cannot be read, made or written.
    """
    _require_one_question(options)
    if options.sweep is not None:
        return _sweep(options, parse_sweep(options.sweep))
    wish = run_wish(options)
    found_on = _machine(options, wish, quotas_of(options))
    if options.write is not None:
        quota_keys(found_on.machine)
    wishes = [with_placement(wish, each) for each in options.compare or ()]
    program = program_of(_model(options, wish, found_on))

    def planned(wish: RunWish) -> PlanResult:
        return find(program, found_on.machine, wish, found_on.remarks, found_on.memory_bytes)

    if options.compare is not None:
        return _compare(options, [planned(each) for each in wishes])
    result = planned(wish)
    _print(options, to_mapping(result), "\n".join(to_lines(result)))
    if options.write is not None:
        write_run(options.write, wish, result)
    if options.trace is not None:
        write_trace(options.trace, result)
    if options.page is not None:
        write_pages(options.page, [result], f"{program.name} on {found_on.machine.name}")
    return _FITS if result.fits else _DOES_NOT_FIT


def _require_one_question(options: argparse.Namespace) -> None:
    """Refuse what goes with nothing else, before anything is computed."""
    outputs = {name: getattr(options, name) for name in ("write", "trace", "page", "png")}
    paths = {name: path for name, path in outputs.items() if path is not None}
    require_places(list(paths.values()))
    for name, path in paths.items():
        require_ours(name, path)
    asked = [f"--{name}" for name in ("sweep", "compare", "placement") if getattr(options, name) is not None]
    if len(asked) > 1:
        raise UsageError(f"{' and '.join(asked)}: each is a question of its own; give one of them")
    one_run = [f"--{name}" for name in ("write", "trace") if getattr(options, name) is not None]
    if asked and asked[0] != "--placement" and one_run:
        raise UsageError(f"{asked[0]} predicts several runs: leave {' and '.join(one_run)} out")
    if options.sweep is not None and options.page is not None:
        raise UsageError("--sweep has no timeline to show: leave --page out, or give --png")
    if options.png is not None and options.sweep is None:
        raise UsageError("--png draws a sweep: give --sweep, or --page for one run")


def _compare(options: argparse.Namespace, results: list[PlanResult]) -> int:
    first, second = results
    names = (options.compare[0], options.compare[1])
    _print(options, compare_json(first, second), compare_table(first, second, names=names))
    if options.page is not None:
        write_pages(options.page, results, f"{names[0]} and {names[1]}")
    return _FITS if all(each.fits for each in results) else _DOES_NOT_FIT


def _sweep(options: argparse.Namespace, sweep: Sweep) -> int:
    """Plan for each quota, least first: what was found with less is found with more, too.

    The program is traced again only where quotas group it otherwise.
    """
    wish = replace(run_wish(options), asks_remedies=False)  # the next points of the sweep are the answer
    tier = _TIER_OF[sweep.name]
    beside = {name: nbytes for name, nbytes in quotas_of(options).items() if name != tier}
    whole = _machine(options, wish, {**beside, tier: max(sweep.quotas_bytes)})
    traced: Callable[[ModelWish], Program] = cache(program_of)

    best: list[PlanResult] = []

    def plan(quota_bytes: int) -> PlanResult:
        found_on = with_quotas(whole.machine, {tier: quota_bytes})
        program = traced(_model(options, wish, found_on))
        found = find(program, found_on.machine, wish, whole.remarks, whole.memory_bytes)
        best[:] = [no_slower(found, best[0] if best else None, wish, tier)]
        return best[0]

    points = swept(sweep, plan)
    _print(options, {"name": sweep.name, "points": sweep_json(points)}, sweep_table(points))
    if options.png is not None:
        try:
            write_sweep_png(points, options.png, name=sweep.name)
        except OSError as cause:
            raise UsageError(f"{options.png}: cannot be written: {cause.strerror or cause}") from cause
    return _FITS if any(point.step_s is not None for point in points) else _DOES_NOT_FIT


def _machine(options: argparse.Namespace, wish: RunWish, quotas: Mapping[str, int]) -> RunMachine:
    return machine_of(
        options.machine, wish.settings, quotas, lambda machine: host_of(options.machine, machine, options)
    )


def _model(options: argparse.Namespace, wish: RunWish, found_on: RunMachine) -> ModelWish:
    return model_wish(options, wish.settings, found_on.machine.tiers[0].capacity_bytes)


def _print(options: argparse.Namespace, facts: object, text: str) -> None:
    print(json.dumps(facts, allow_nan=False, indent=2) if options.json else text)


def _count(text: str) -> int:
    if text.isascii() and text.isdecimal() and len(text) < _COUNT_DIGITS and int(text):
        return int(text)
    raise argparse.ArgumentTypeError(f"{quoted(text)}; accepted: a whole number, 1 or more")


def _size(text: str) -> int:
    try:
        return parse_bytes(
            int(text) if text.isascii() and text.isdecimal() and len(text) < _SIZE_DIGITS else text
        )
    except ConfigError as fault:
        raise argparse.ArgumentTypeError(str(fault)) from fault
