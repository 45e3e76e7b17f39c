"""Loops that nobody wrote, plain and offloaded: the same bits; and that the harness is not blind."""

from __future__ import annotations

import multiprocessing
import os
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, find, given, settings
from torch import nn

from tests.sampling import PROFILE
from tests.training.differential.__main__ import report_lost
from tests.training.differential.features import OFF
from tests.training.differential.programs import TABLES, WORDS, Layout, Piece, Program, filled
from tests.training.differential.running import End, outcome_of
from tests.training.differential.searching import Search, little_to_look_through
from tests.training.differential.strategies import programs
from tests.training.differential.trial import end_checkpoints
from tierstore.errors import UsageError

_LONG_PROGRAMS = int(os.environ.get("DIFFERENTIAL_PROGRAMS", "20000"))
_PROGRAMS = {"ci": 40, "long": _LONG_PROGRAMS}.get(PROFILE, 200)


@pytest.fixture(autouse=True)
def _little_to_look_through() -> Iterator[None]:
    with little_to_look_through():
        yield


def test_proxies_of_what_is_gone_do_not_keep_checkpoints_from_their_end() -> None:
    gone = torch.ones(1)
    proxy: object = weakref.proxy(gone)
    del gone
    with torch.autograd.graph.saved_tensors_hooks(lambda each: each, lambda each: each):
        end_checkpoints()
    del proxy


def check(program: Program) -> None:
    """Raise if a program differs, with all that is needed to see why."""
    outcome = outcome_of(program)
    assert outcome.end is not End.DIFFERENT, f"{outcome.detail}\n{program.layout}\n\n{program.text}"


@settings(
    max_examples=_PROGRAMS,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate, Phase.shrink],
)
@given(programs())
@pytest.mark.timeout(6 * 3600)
def test_a_loop_that_nobody_wrote_is_the_same_offloaded(program: Program) -> None:
    check(program)


def test_what_the_compiler_asks_for_while_it_compiles_is_no_difference() -> None:
    check(replace(_with(Piece("action", "function mode")), parts=(Piece("part", "compiled"),)))


@pytest.mark.parametrize("which", [0, 1])
def test_a_tangent_goes_along_where_the_only_part_is_on_the_host(which: int) -> None:
    program = _with(Piece("action", "forward ad", which))
    check(replace(program, layout=Layout("device", room=3, side=1), knots=()))


# ---------------------------------------------------------------------- the tables


def test_what_is_switched_off_exists_and_has_a_reason() -> None:
    pieces = {f"{table} {name}" for table, names in TABLES.items() for name in names}
    assert {name for joined in OFF for name in joined.split(" + ")} <= pieces | set(WORDS)
    assert all(OFF.values())


def test_words_of_the_text_are_features() -> None:
    ways = [_with(Piece("optimizer", "adam", number)) for number in range(20)]
    assert {"fused=True" in program.features() for program in ways} == {True, False}
    assert all(("fused=True" in each.text) == ("fused=True" in each.features()) for each in ways)


def test_numbers_choose_among_alternatives() -> None:
    assert filled("f(<a>, <b:x|y>)", 3, 3) == "f(3, y)"


@pytest.mark.parametrize("table", TABLES)
def test_every_entry_of_a_table_runs_plain(table: str) -> None:
    for name in TABLES[table]:
        outcome = outcome_of(_with(Piece(table, name)), _nothing)
        assert outcome.end is End.SAME, (name, outcome.reason, outcome.detail)


def _with(piece: Piece) -> Program:
    """Return the smallest program with a piece, in which the others are at their simplest."""
    chosen = {table: (Piece(table, name),) for table, name in _SIMPLEST.items()} | {piece.table: (piece,)}
    return Program(
        parts=chosen["part"],
        knots=chosen["knot"] if piece.table == "knot" else (),
        before=chosen["hook"] if piece.table == "hook" else (),
        optimizers=chosen["optimizer"],
        after=(),
        actions=(*chosen["action"], Piece("action", "train and look")),
        layout=Layout(),
        is_watched=True,
    )


_SIMPLEST = {"part": "linear", "knot": "tied", "hook": "forward", "optimizer": "sgd", "action": "train"}


# ---------------------------------------------------------------------- not blind


class _Nothing:
    """A run that offloads nothing: the same as plain, unless a test plants something."""

    def __init__(self, model: nn.Module, end: Callable[[nn.Module], None] = lambda _: None) -> None:
        self._model = model
        self._end = end
        self.store = self
        self.tiers: dict[str, object] = {}

    def stats(self) -> _Nothing:
        """Nothing is leased."""
        return self

    def check(self) -> None:
        """All is well."""

    def close(self) -> None:
        """End."""
        self._end(self._model)


def _nothing(model: nn.Module, optimizers: Any, config: Any, **more: Any) -> _Nothing:  # noqa: ANN401 - as `offload`
    return _Nothing(model)


def _spoils_a_value(model: nn.Module, optimizers: Any, config: Any, **more: Any) -> _Nothing:  # noqa: ANN401
    def end(model: nn.Module) -> None:
        for p in model.parameters():
            if p.dim() == 2 and p.is_floating_point():
                with torch.no_grad():
                    p.view(-1)[:1].mul_(1 + 1e-6)

    return _Nothing(model, end)


def _spoils_strides(model: nn.Module, optimizers: Any, config: Any, **more: Any) -> _Nothing:  # noqa: ANN401
    def end(model: nn.Module) -> None:
        for p in model.parameters():
            p.data = p.data.contiguous()

    return _Nothing(model, end)


def _leaves_a_hook(model: nn.Module, optimizers: Any, config: Any, **more: Any) -> _Nothing:  # noqa: ANN401
    model.register_forward_hook(lambda *_: None)
    return _Nothing(model)


def _draws_a_number(model: nn.Module, optimizers: Any, config: Any, **more: Any) -> _Nothing:  # noqa: ANN401
    return _Nothing(model, lambda _: torch.rand(1) and None)  # type: ignore[arg-type]


def _steps_twice(model: nn.Module, optimizers: Any, config: Any, **more: Any) -> _Nothing:  # noqa: ANN401
    def again(optimizer: torch.optim.Optimizer, *_: object) -> None:
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * 0.5

    for optimizer in optimizers:
        optimizer.register_step_post_hook(again)
    return _Nothing(model)


def _unties(model: nn.Module, optimizers: Any, config: Any, **more: Any) -> _Nothing:  # noqa: ANN401
    def end(model: nn.Module) -> None:
        for p in model.parameters():
            p.data = p.data.clone(memory_format=torch.preserve_format)

    return _Nothing(model, end)


def _loses_accumulation(model: nn.Module, optimizers: Any, config: Any, **more: Any) -> _Nothing:  # noqa: ANN401
    for p in model.parameters():
        if p.requires_grad:
            p.register_hook(lambda g, p=p: setattr(p, "grad", None))
    return _Nothing(model)


PLANTED = (
    _spoils_a_value,
    _spoils_strides,
    _leaves_a_hook,
    _draws_a_number,
    _steps_twice,
    _unties,
    _loses_accumulation,
)


@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_difference_is_found_and_shrunk(planted: Callable[..., _Nothing]) -> None:
    program = find(
        programs({}),
        lambda program: outcome_of(program, planted).end is End.DIFFERENT,
        settings=settings(
            max_examples=2000,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate, Phase.shrink],
        ),
    )
    assert len(program.parts) == 1
    assert len(list(program.pieces())) <= 5, program.text


def test_a_plain_run_does_not_differ_from_another() -> None:
    tally = Search({}, open_run=_nothing).round(1)
    assert not tally.found
    assert tally.ends[End.SAME.name] == sum(tally.ends.values()) - tally.ends[End.INVALID.name]


def test_a_refusal_before_the_first_step_is_counted_and_a_later_one_is_a_difference() -> None:
    def refuses(*_: object, **__: object) -> _Nothing:
        raise UsageError("not this one")

    class Late(_Nothing):
        def check(self) -> None:
            raise UsageError("too late")

    program = _with(Piece("action", "train"))
    assert outcome_of(program, refuses).end is End.REFUSED
    assert outcome_of(program, lambda model, *_, **__: Late(model)).end is End.DIFFERENT


@pytest.mark.parametrize(
    "piece", [Piece("knot", "module twice"), Piece("part", "old weight norm")], ids=lambda piece: piece.name
)
@pytest.mark.parametrize("action", ["functional call", "func of input", "disable saved hooks"])
def test_what_modules_themselves_keep_of_graphs_is_no_lease_that_is_left(piece: Piece, action: str) -> None:
    program = _with(piece)
    actions = (Piece("action", action), *program.actions[:1], Piece("action", action, 1))
    check(replace(program, parts=(*program.parts, Piece("part", "linear")), actions=actions))


def test_a_checkpoint_that_an_interrupt_keeps_from_its_end_is_ended() -> None:
    """PyTorch pops its hooks when the collector comes by, which may be in the midst of another program."""
    program = _with(Piece("part", "checkpointed by hooks", 1))
    for module in range(6):  # some are inside
        check(replace(program, actions=(Piece("action", "forward fails", module, 1),)))


def test_a_mode_does_not_see_that_a_replaced_buffer_goes() -> None:
    """The emulated device overwrites what is freed."""
    train = Piece("action", "train")
    actions = (train, train, Piece("action", "replace buffer"), Piece("action", "dispatch mode"))
    program = replace(_with(Piece("part", "tables outside")), actions=actions, layout=Layout("device", 3))
    check(program)


def test_the_search_reports_the_smallest_program_of_each_difference() -> None:
    tally = Search({}, open_run=_leaves_a_hook).round(1)
    ((reason, (program, _)),) = tally.found.items()
    assert reason.startswith("closed: objects")
    assert len(program.parts) == 1
    assert len(program.actions) == 1


def test_a_worker_that_has_ended_in_its_midst_is_told() -> None:
    workers = [multiprocessing.get_context("spawn").Process(target=os._exit, args=(code,)) for code in (0, 3)]
    for worker in workers:
        worker.start()
    said: list[str] = []
    assert not report_lost(workers[:1], said.append)
    assert report_lost(workers, said.append)
    assert said == ["a worker has ended in its midst, with exit code 3"]
