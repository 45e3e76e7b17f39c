"""What a run tells of its own steps is what it asked of its store, and predicts what it moves."""

from __future__ import annotations

import errno
import itertools
import json
import os
import time
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from torch import nn

from tests.forked import in_child
from tests.training.recorded_machines import (
    MODELS,
    QUOTAS,
    Trained,
    machine_of,
    mlp,
    moved,
    opened,
    step,
    traffic,
)
from tierstore import UsageError
from tierstore.planning.chrome import program_from_chrome, timeline_from_chrome
from tierstore.planning.deciding import StepPhase
from tierstore.planning.program import ByteKind, Does, Phase, Program
from tierstore.planning.simulating import simulate
from tierstore.planning.timeline import COMPUTE, WAITING, Timeline
from tierstore.store import Store
from tierstore.training import offload
from tierstore.training.budgets.device_quota import DeviceQuota
from tierstore.training.recording.recorder import StepRecorder

STEPS, LEARNING = 6, 2


@pytest.mark.parametrize(("name", "number"), [(name, number) for name in MODELS for number in (0, 1)])
def test_simulated_steps_move_the_bytes_that_the_run_moves(name: str, number: int, tmp_path: Path) -> None:
    trained, quota = MODELS[name](), QUOTAS[name][number]
    measured = []
    with opened(trained, tmp_path, quota) as run:
        for _ in range(STEPS):
            before = traffic(run)
            step(trained)
            measured.append(moved(before, traffic(run)))
        program = run.program()
        timeline = simulate(program, machine_of(run, quota), run.placement, steps=STEPS)
    assert any(measured[LEARNING:])
    assert [dict(each.moved_bytes) for each in timeline.steps[LEARNING:]] == measured[LEARNING:]


def test_a_program_has_the_uses_that_the_store_was_asked_for(tmp_path: Path) -> None:
    trained = mlp()
    with opened(trained, tmp_path, "200KB") as run:
        step(trained)
        with run.store.recorded() as recording:
            step(trained)
        step(trained)
        program = run.program()
    opens = (Does.READ, Does.WRITE)
    uses = [use for moment in program.moments for use in moment.uses]
    leases = [
        (key, lease.is_written)
        for lease in sorted(recording.leases, key=lambda x: x.asked_s)
        for key in lease.keys
    ]
    assert [(use.key, use.does is Does.WRITE) for use in uses if use.does in opens] == leases
    made = [(use.key, program.data[use.key].nbytes) for use in uses if use.does is Does.MAKE]
    assert made == [(put.key, put.nbytes) for put in recording.puts]
    dropped = [key for each in recording.renamings for key in each.names]
    assert sorted(use.key for use in uses if use.does is Does.END) == sorted(dropped)
    assert all(lease.keys[0] in program.data for lease in recording.leases)


def test_what_the_host_took_once_only_is_no_part_of_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_s = 0.0
    put = Store.put

    def slowly(store: Store, *args: object, **kwargs: object) -> object:
        begin_s = time.perf_counter()
        while time.perf_counter() - begin_s < slow_s:
            pass
        return put(store, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Store, "put", slowly)
    trained = mlp()
    with opened(trained, tmp_path, "200KB") as run:
        step(trained)
        slow_s = 0.05  # each of twelve gradients is put: more than all else takes
        step(trained)
        slow_s = 0.0
        step(trained)
        program = run.program()
    assert sum(moment.host_s + moment.compute_s for moment in program.moments) < 12 * 0.05


def _mlp_program(tmp_path: Path) -> Program:
    trained = mlp()
    with opened(trained, tmp_path, "200KB") as run:
        for _ in range(3):
            step(trained)
        return run.program()


def test_a_program_says_what_a_step_is_made_of(tmp_path: Path) -> None:
    program = _mlp_program(tmp_path)
    assert (program.source, program.name, program.accumulations) == ("trace", "Sequential", 1)
    assert program.facts["inputs"] == "float32[8, 96]"
    assert program.facts["optimizers"] == "AdamW"
    assert program.assumptions == ()
    phases = list(dict.fromkeys(moment.phase for moment in program.moments))
    assert phases == [Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.BETWEEN]
    assert [unit.bundle for unit in program.units] == [f"param/{layer}.0.weight" for layer in range(6)]
    assert program.units[2].state == "state/0/2.0.weight"
    assert program.units[2].gradients == ("grad/2.0.weight", "grad/2.0.bias"), "as steps open them"
    ended = [use.key for use in program.moments[-1].uses if use.does is Does.END]
    assert ended == [f"grad/{layer}.0.{kind}" for layer in range(6) for kind in ("weight", "bias")]
    assert all(unit.may_step_ahead and unit.device_step_s > 0 for unit in program.units)
    assert all(unit.host_step_s == unit.device_step_s for unit in program.units)  # the host's kernels
    assert program.data["param/3.0.weight"].layer == 3
    kinds = {kind: sum(each.kind is kind for each in program.data.values()) for kind in ByteKind}
    assert kinds[ByteKind.PARAMETERS] == kinds[ByteKind.STATE] == 6
    assert kinds[ByteKind.GRADIENT] == 12
    assert program.compute_s > 0


def test_activations_of_one_layer_after_another_are_live_bytes(tmp_path: Path) -> None:
    program = _mlp_program(tmp_path)
    live = [moment.live_bytes for moment in program.moments if moment.phase is Phase.FORWARD and moment.uses]
    activation = 8 * 96 * 4
    assert [after - before for before, after in itertools.pairwise(live)] == [activation] * 5
    optimizer = [moment for moment in program.moments if moment.phase is Phase.OPTIMIZER and moment.uses]
    assert all(moment.workspace_bytes >= 2 * 96 * 96 * 4 for moment in optimizer)  # of lists of tensors


def test_one_fingerprint_is_of_one_model(tmp_path: Path) -> None:
    first, again = _mlp_program(tmp_path / "a"), _mlp_program(tmp_path / "b")
    assert first.fingerprint == again.fingerprint
    trained = MODELS["residual"]()
    with opened(trained, tmp_path / "c", "200KB") as run:
        for _ in range(3):
            step(trained)
        assert run.program().fingerprint != first.fingerprint


def test_it_says_how_many_steps_are_missing(tmp_path: Path) -> None:
    trained = mlp()
    with opened(trained, tmp_path, "200KB") as run:
        for missing in (3, 2, 1):
            with pytest.raises(
                UsageError, match=rf"{missing} more steps have to run.*so far there were {3 - missing}\."
            ):
                run.program()
            step(trained)
        assert run.program().units
    with pytest.raises(UsageError, match="closed"):
        run.program()


def test_copies_of_the_learned_steps_are_told_once_these_have_run(tmp_path: Path) -> None:
    trained = mlp()
    with opened(trained, tmp_path, "200KB") as run:
        for missing in (3, 2, 1):
            with pytest.raises(UsageError, match=rf"{missing} more steps have to run.*were {3 - missing}\."):
                run.recorded_copies()
            before = traffic(run)
            step(trained)
        copies = run.recorded_copies()
        assert {f"{each.source}->{each.target}" for each in copies} >= set(moved(before, traffic(run)))
        assert all(each.end_s >= each.begin_s for each in copies)
    with pytest.raises(UsageError, match="closed"):
        run.recorded_copies()


def test_without_a_store_there_is_nothing_to_watch() -> None:
    with offload(nn.Linear(2, 2), None, {"memory_offload": "OFF"}) as run:
        with pytest.raises(UsageError, match="memory_offload is OFF"):
            run.program()
        with pytest.raises(UsageError, match="memory_offload is OFF"):
            run.record("trace.json")


def test_accumulated_passes_are_moments_of_one_step(tmp_path: Path) -> None:
    trained = mlp()
    with opened(trained, tmp_path, "200KB") as run:
        for _ in range(3):
            step(trained, passes=3)
        program = run.program()
    assert program.accumulations == 3
    made = [use.key for moment in program.moments for use in moment.uses if use.does is Does.MAKE]
    assert len(made) == len(set(made)) == 12
    written = [
        use.key
        for moment in program.moments
        for use in moment.uses
        if use.does is Does.WRITE and moment.phase is Phase.BACKWARD
    ]
    assert sorted(written) == sorted(made * 2)


def test_evaluations_between_are_left_out_and_said(tmp_path: Path) -> None:
    trained = mlp()
    with opened(trained, tmp_path, "200KB") as run:
        for _ in range(3):
            step(trained)
            with torch.no_grad():
                trained.model(trained.inputs)
        program = run.program()
    assert any("1 evaluations" in each for each in program.assumptions)
    forward = [moment for moment in program.moments if moment.phase is Phase.FORWARD and moment.uses]
    assert len(forward) == 6
    assert not any(use.does is Does.READ for use in program.moments[-1].uses)


def test_a_step_in_whose_midst_an_exception_came_does_not_count(tmp_path: Path) -> None:
    trained = mlp()
    with opened(trained, tmp_path, "200KB") as run:
        step(trained)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            trained.model(torch.ones(8, 97))
        step(trained)
        step(trained)
        with pytest.raises(UsageError, match="1 more steps"):
            run.program()
        step(trained)
        program = run.program()
    assert len([each for each in program.moments if each.phase is Phase.FORWARD and each.uses]) == 6


def test_optimizers_in_backward_have_no_gradients_in_the_program(tmp_path: Path) -> None:
    trained = mlp()
    with opened(trained, tmp_path, "200KB", optimizer_in_backward=True) as run:
        for _ in range(3):
            trained.model(trained.inputs).square().mean().backward()
        program = run.program()
    assert program.facts["optimizer_in_backward"] == "true"
    assert program.assumptions == (
        "optimizers step in backward: their steps are moments of it, and gradients are no data",
    )
    assert not any(each.kind is ByteKind.GRADIENT for each in program.data.values())
    written = {
        use.key
        for moment in program.moments
        for use in moment.uses
        if use.does is Does.WRITE and moment.phase is Phase.BACKWARD
    }
    assert written == {key for key, each in program.data.items() if each.kind is not ByteKind.BUFFER}


def test_steps_that_are_made_aside_are_where_the_optimizer_takes_them(tmp_path: Path) -> None:
    trained = mlp()
    with opened(trained, tmp_path, "400KB", optimizer_target="cpu") as run:
        for _ in range(3):
            step(trained)
        program = run.program()
    turns = [moment for moment in program.moments if moment.phase is Phase.OPTIMIZER and moment.uses]
    assert len(turns) == len(program.units) == 6
    for turn, unit in zip(turns, program.units, strict=True):
        keys = [use.key for use in turn.uses]
        assert sorted(keys) == sorted([unit.bundle, unit.state or "", *unit.gradients])
        sizes = [program.data[key].nbytes for key in keys]
        assert sizes == sorted(sizes, reverse=True)
        assert [use.key for use in turn.uses if use.does is Does.READ] == [
            key for key in keys if key in unit.gradients
        ]


def test_swapped_activations_are_made_used_and_ended() -> None:
    trained = mlp()._replace(inputs=torch.randn(400, 96))
    document = {
        "offload_config": {
            "device": "emulated",
            "max_device_memory": "900KB",
            "offload_cpu_size": "16MB",
            "offload_disk_size": 0,
            "host_mem_block_size": "1MB",
        },
        "swap_config": {"swap": True, "layer_swap": [{"backward_prefetch": 1, "layers": True}]},
    }
    with offload(trained.model, trained.optimizers, document) as run:
        for _ in range(3):
            step(trained)
        program = run.program()
    activations = [key for key, each in program.data.items() if each.kind is ByteKind.ACTIVATION]
    assert {program.data[key].layer for key in activations} == set(range(6))
    for key in activations:
        does = [use.does for moment in program.moments for use in moment.uses if use.key == key]
        assert does[0] is Does.MAKE
        assert does[-1] is Does.END
        assert len(does) > 2
        assert set(does[1:-1]) <= {Does.READ, Does.WRITE}


# ---------------------------------------------------------------------- files


def _recorded(trained: Trained, tmp_path: Path, steps: int = 2) -> tuple[Timeline, list[dict[str, int]], str]:
    path = tmp_path / "trace.json"
    measured = []
    link = {"link_bandwidth": 50_000_000}
    with opened(trained, tmp_path / "store", "240KB", device_options=link) as run:
        for _ in range(3):
            step(trained)
        with run.record(path):
            for _ in range(steps):
                before = traffic(run)
                step(trained)
                measured.append(moved(before, traffic(run)))
    text = path.read_text(encoding="utf-8")
    return timeline_from_chrome(text), measured, text


def test_a_measured_timeline_has_the_bytes_of_the_stats(tmp_path: Path) -> None:
    timeline, measured, _ = _recorded(mlp(), tmp_path)
    assert timeline.source == "measured"
    total = {link: sum(each.get(link, 0) for each in measured) for each in measured for link in each}
    drawn: dict[str, int] = {}
    for each in timeline.intervals:
        if each.nbytes:
            drawn[each.lane] = drawn.get(each.lane, 0) + each.nbytes
    assert drawn == total
    stepped = {link: sum(each.moved_bytes.get(link, 0) for each in timeline.steps) for link in total}
    assert stepped == total
    assert len(timeline.steps) == 2


def test_lanes_hold_one_thing_at_a_time_within_the_recording(tmp_path: Path) -> None:
    timeline, _, _ = _recorded(mlp(), tmp_path)
    lanes = {each.lane for each in timeline.intervals}
    assert {COMPUTE, WAITING, "host->device", "device->host"} <= lanes
    for lane in lanes:
        inside = [each for each in timeline.intervals if each.lane == lane]
        assert all(former.end_s <= each.begin_s for former, each in itertools.pairwise(inside)), lane
    working = sorted(
        (each for each in timeline.intervals if each.lane in (COMPUTE, WAITING)),
        key=lambda each: each.begin_s,
    )
    assert all(former.end_s <= each.begin_s for former, each in itertools.pairwise(working))
    assert all(0 <= each.begin_s <= each.end_s for each in timeline.intervals)
    assert all(0 < each.peak_bytes["device"] <= 240 * 1024 for each in timeline.steps)
    assert timeline.account.nbytes == sum(timeline.account.kinds.values())


def test_a_trace_has_the_program_and_the_clock_of_the_calendar(tmp_path: Path) -> None:
    _, _, text = _recorded(mlp(), tmp_path)
    assert program_from_chrome(text).units
    base_s = json.loads(text)["baseTimeNanoseconds"] / 1e9
    assert abs(base_s - (tmp_path / "trace.json").stat().st_mtime) < 60


def test_a_profiler_and_a_trace_have_one_clock(tmp_path: Path) -> None:
    trained = mlp()
    with opened(trained, tmp_path / "store", "200KB") as run, torch.profiler.profile() as profiler:
        for _ in range(3):
            step(trained)
        with run.record(tmp_path / "ours.json"), torch.profiler.record_function("all of it"):
            step(trained)
    profiler.export_chrome_trace(str(tmp_path / "theirs.json"))
    theirs = json.loads((tmp_path / "theirs.json").read_text(encoding="utf-8"))
    ours = json.loads((tmp_path / "ours.json").read_text(encoding="utf-8"))
    (around,) = (
        each for each in theirs["traceEvents"] if each.get("name") == "all of it" and each["ph"] == "X"
    )
    begin_us = around["ts"] + theirs["baseTimeNanoseconds"] / 1000
    shift_us = ours["baseTimeNanoseconds"] / 1000
    slices = [each for each in ours["traceEvents"] if each["ph"] == "X"]
    tolerance_us = 1000
    assert min(each["ts"] for each in slices) + shift_us >= begin_us - tolerance_us
    end_us = begin_us + around["dur"] + tolerance_us
    assert max(each["ts"] + each["dur"] for each in slices if each["name"] != "between") + shift_us <= end_us


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_a_trace_is_written_however_its_block_ends(kind: type[BaseException], tmp_path: Path) -> None:
    trained = mlp()
    with opened(trained, tmp_path / "store", "200KB") as run:
        with pytest.raises(kind), run.record(tmp_path / "trace.json"):
            _step_and_raise(trained, kind)
        step(trained)
    assert timeline_from_chrome((tmp_path / "trace.json").read_text(encoding="utf-8")).steps
    assert [each.name for each in tmp_path.iterdir()] == ["trace.json"]


def _step_and_raise(trained: Trained, kind: type[BaseException]) -> NoReturn:
    step(trained)
    raise kind


def test_a_full_disk_leaves_the_former_trace_and_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained, path = mlp(), tmp_path / "trace.json"
    path.write_text("former", encoding="utf-8")

    def full(_: int) -> NoReturn:
        raise OSError(errno.ENOSPC, "no space left")

    with opened(trained, tmp_path / "store", "200KB") as run:
        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="no space left"), run.record(path):
            step(trained)
        with pytest.raises(ZeroDivisionError), run.record(path):
            _step_and_raise(trained, ZeroDivisionError)
        monkeypatch.undo()
        step(trained)
    assert path.read_text(encoding="utf-8") == "former"
    assert [each.name for each in tmp_path.iterdir()] == ["trace.json"]


def test_a_path_that_cannot_be_written_is_refused_before_the_block(tmp_path: Path) -> None:
    trained = mlp()
    with opened(trained, tmp_path / "store", "200KB") as run:
        with pytest.raises(UsageError, match="it is a directory"), run.record(tmp_path):
            pytest.fail("the block ran")
        with pytest.raises(FileNotFoundError), run.record(tmp_path / "absent" / "trace.json"):
            pytest.fail("the block ran")


def test_a_trace_is_the_parents_after_a_fork(tmp_path: Path) -> None:
    trained, path = mlp(), tmp_path / "trace.json"
    with opened(trained, tmp_path / "store", "200KB") as run:
        block = run.record(path)
        block.__enter__()
        step(trained)
        in_child(lambda: block.__exit__(None, None, None))
        assert not path.exists()
        block.__exit__(None, None, None)
    assert timeline_from_chrome(path.read_text(encoding="utf-8")).steps


def test_a_run_may_be_closed_while_it_is_recorded(tmp_path: Path) -> None:
    trained = mlp()
    with opened(trained, tmp_path / "store", "200KB") as run, run.record(tmp_path / "trace.json"):
        step(trained)
        run.close()
    assert timeline_from_chrome((tmp_path / "trace.json").read_text(encoding="utf-8")).steps


# ---------------------------------------------------------------------- nobody's trouble


def test_bits_are_those_of_plain_training_while_it_is_recorded(tmp_path: Path) -> None:
    plain, ours = mlp(), mlp()
    for _ in range(4):
        step(plain)
    with opened(ours, tmp_path / "store", "200KB") as run, run.record(tmp_path / "trace.json"):
        for _ in range(4):
            step(ours)
        run.program()
    for one, other in zip(plain.model.parameters(), ours.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_the_device_is_divided_alike_whether_moments_are_looked_at_or_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    divided: list[tuple[StepPhase, int]] = []
    entered = DeviceQuota._enter

    def enter(self: DeviceQuota, phase: StepPhase) -> None:
        entered(self, phase)
        divided.append((phase, self._store.stats().tiers["device"].capacity_bytes))

    monkeypatch.setattr(DeviceQuota, "_enter", enter)
    for is_watched in (True, False):
        trained = mlp()
        if not is_watched:
            monkeypatch.setattr(StepRecorder, "watched", lambda _: pytest.fail("it is watched"))
            monkeypatch.setattr(StepRecorder, "begin_forward", lambda *_: None)
        with opened(trained, tmp_path / str(is_watched), "200KB"):
            for _ in range(4):
                step(trained)
    half = len(divided) // 2
    assert divided[:half] == divided[half:]


def test_nothing_is_noted_after_the_steps_that_are_learned_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = mlp()
    with opened(trained, tmp_path, "200KB"):
        for _ in range(3):
            step(trained)
        trained.model(trained.inputs)
        noted = []
        monkeypatch.setattr(StepRecorder, "_add", lambda *_: noted.append(1))
        step(trained)
        assert not noted
