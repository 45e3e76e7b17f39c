"""Traces of a profiler say what the store does, and can be written without the library's own frames."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import profile

from tests.stores import make_store, numbered
from tests.training.test_live_view import Trained
from tierstore import trace_ranges
from tierstore.errors import KeyNotFound, UsageError
from tierstore.integrations.profiling import nvtx, trace_handler, without_own_frames

_RANGE = re.compile(r"tierstore::(fetch|prefetch|evict|step ahead|step|copy \w+ to \w+:) .+ \(\d[\d.]* \w+\)")


def _names(profiler: Any) -> list[str]:  # noqa: ANN401 - a profile
    return [event.name for event in profiler.events() if event.name.startswith(trace_ranges.PREFIX)]


def test_ranges_have_keys_and_bytes(tmp_path: Path) -> None:
    with make_store(1000, 1000) as store:
        store.put("a", numbered(1))
        with profile() as profiler:
            store.lease("a").release()
            store.fetch("a").result(10)
            store.prefetch("a").result(10)
            store.evict("a").result(10)
        store.lease("a").release()
        assert _names(profiler) == [
            "tierstore::fetch a (100 B)",
            "tierstore::fetch a (100 B)",
            "tierstore::prefetch a (100 B)",
            "tierstore::evict a (100 B)",
            "tierstore::copy host to disk: a (100 B)",
        ]


def test_a_step_has_ranges_of_what_is_fetched_copied_and_stepped(tmp_path: Path) -> None:
    trained = Trained(tmp_path)
    with trained.run:
        for _ in range(3):
            trained.step()
        with profile() as profiler:
            trained.step()
        names = _names(profiler)
    assert names
    assert all(_RANGE.fullmatch(name) for name in names)
    assert {name.split(" ")[0] for name in names} >= {
        "tierstore::fetch",
        "tierstore::step",
        "tierstore::copy",
    }
    assert any("param/0.weight" in name for name in names)


def test_without_a_profiler_no_range_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("a range was made")

    monkeypatch.setattr(trace_ranges, "named_range", fail)
    trained = Trained(tmp_path)
    with trained.run:
        trained.step()


def test_a_profiler_changes_no_bit_and_no_error(tmp_path: Path) -> None:
    plain, profiled = Trained(tmp_path / "a"), Trained(tmp_path / "b")
    with plain.run, profiled.run:
        for _ in range(4):
            expected = plain.step()
            with profile():
                assert profiled.step() == expected
    with make_store(1000) as store, profile(), pytest.raises(KeyNotFound):
        store.lease("nothing")


def test_of_many_keys_the_first_are_named() -> None:
    with profile() as profiler, trace_ranges.named_range("fetch", ["x" * 500, "b", "c", "d", "e"], 2048):
        pass
    assert _names(profiler) == [f"tierstore::fetch {'x' * 120}, b, c and 2 more (2.0 KiB)"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is NVTX")
def test_without_nvtx_it_is_refused_and_nothing_stays_on() -> None:
    with pytest.raises(UsageError, match="need PyTorch for CUDA"), nvtx():
        pass
    assert not trace_ranges.are_on()


def test_ranges_of_nvtx_are_made_in_all_threads_and_end_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    pushed: list[str] = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", pushed.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: pushed.append("pop"))

    def act() -> None:
        with trace_ranges.named_range("fetch", ["a"], 1):
            pushed.append("inside")

    with nvtx(), nvtx():
        assert trace_ranges.are_on()
        thread = threading.Thread(target=act)
        thread.start()
        thread.join()
    assert not trace_ranges.are_on()
    assert pushed[-3:] == ["tierstore::fetch a (1 B)", "inside", "pop"]


# ---------------------------------------------------------------------- frames


def test_a_trace_with_stacks_is_written_without_our_frames(tmp_path: Path) -> None:
    trained, target = Trained(tmp_path), tmp_path / "trace.json"
    with trained.run:
        for _ in range(3):
            trained.step()
        with profile(with_stack=True) as whole:
            trained.step()
        whole.export_chrome_trace(str(tmp_path / "whole.json"))
        with profile(with_stack=True, on_trace_ready=trace_handler(target)):
            trained.step()
    assert sorted(each.name for each in tmp_path.iterdir() if each.is_file()) == ["trace.json", "whole.json"]
    assert target.stat().st_size < (tmp_path / "whole.json").stat().st_size / 4
    events = json.loads(target.read_text())["traceEvents"]
    frames = [each for each in events if each.get("cat") == "python_function"]
    assert not [each["name"] for each in frames if "tierstore/" in each["name"]]
    assert [each["name"] for each in frames if "test_live_view.py" in each["name"] and "step" in each["name"]]
    assert [each for each in events if each.get("cat") == "cpu_op" and each["name"] == "aten::addmm"]
    assert [each for each in events if str(each.get("name")).startswith("tierstore::")]
    ids = {each["args"]["Python id"] for each in frames}
    parents = {each["args"]["Python parent id"] for each in frames} - {None}
    assert parents <= ids


def _frame(name: str, number: int, parent: int | None) -> dict[str, Any]:
    return {"cat": "python_function", "name": name, "args": {"Python id": number, "Python parent id": parent}}


def test_what_our_frames_had_called_is_their_next_caller_s(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    frames = [
        _frame("train.py(1): main", 1, None),
        _frame("tierstore/store.py(2): lease", 2, 1),
        _frame("contextlib.py(3): __enter__", 3, 2),
        _frame("<built-in function len>", 4, 3),
        _frame("torch/_tensor.py(4): backward", 5, 3),
        _frame("<built-in method add>", 6, 5),
        _frame("mine/tierstore/net.py(5): forward", 7, 5),
        _frame("contextlib.py(3): __enter__", 8, 1),
        _frame("tierstore_backends/files/backend.py(1): read", 9, 404),
    ]
    path.write_text(json.dumps({"traceEvents": [*frames, {"cat": "cpu_op", "name": "aten::add"}], "x": 1}))
    assert without_own_frames(path) == 4
    trace = json.loads(path.read_text())
    assert trace["x"] == 1
    assert [
        (each["args"]["Python id"], each["args"]["Python parent id"]) for each in trace["traceEvents"][:-1]
    ] == [
        (1, None),
        (5, 1),
        (6, 5),
        (7, 5),
        (8, 1),
    ]


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", "null", '{"traceEvents": 3}', '{"traceEvents": [3]}', "\x00"]
)
def test_what_is_no_trace_is_refused_and_stays(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"is no trace of torch\.profiler"):
        without_own_frames(path)
    assert path.read_text() == text
    assert [each.name for each in tmp_path.iterdir()] == ["trace.json"]


def test_a_chain_of_callers_that_is_a_circle_ends(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    ours = [_frame("tierstore/a.py(1): a", 3, 4), _frame("tierstore/b.py(1): b", 4, 3)]
    others = [_frame("<a>", 1, 2), _frame("<b>", 2, 1), _frame("train.py(1): main", 5, 3)]
    path.write_text(json.dumps({"traceEvents": [*ours, *others]}))
    assert without_own_frames(path) == 2
