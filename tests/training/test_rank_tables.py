"""Tables whose rows are spread over processes: the bits of one process, and of PyTorch's own modules."""

from __future__ import annotations

import pytest
from torch import distributed

from tests.training.rank_tables import tried_steppers
from tests.training.test_ranks import Found, led

pytestmark = pytest.mark.skipif(not distributed.is_available(), reason="PyTorch was built without it")

_SCENARIOS = (
    "spread:2",
    "spread:3",
    "as_pytorch:2",
    "as_pytorch:3",
    "one_process:1",
    "rules:2",
    "scaled:2",
    "broken:2",
    "parts_left:2",
    "parts_taken:1",
    "parts_taken:3",
    "files:2",
    "around:2",
    "stories:2",
    "failed:2",
    "suspended:2",
    "gone_on_with:2",
    "tables_begin:2",
    "ends:3",
    "acts:2",
    "killed:3",
    "tables_differ:2",
    "returns:2",
    "averaged_again:2",
    "over_some:3",
    "put_aside:2",
    "paused_halves:2",
    "at_the_end:2",
)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    found = led(tmp_path_factory.mktemp("ranks"), *_SCENARIOS)
    failed = [each for led in found.values() for each in led if isinstance(each, str)]
    assert not failed, failed[0]
    return found


@pytest.mark.parametrize("processes", [2, 3])
def test_rows_losses_and_states_are_those_of_all_occurrences_in_one_process(
    found: Found, processes: int
) -> None:
    for each in found[f"spread:{processes}"]:
        assert each == {name: [] for name in each}
        kinds = {name.partition(",")[0] for name in each}
        assert kinds == set(tried_steppers(processes))


@pytest.mark.parametrize(
    ("kind", "processes"), [("SparseAdam", 2), ("Adagrad", 2), ("SGD", 2), ("SparseAdam", 3)]
)
def test_they_are_bit_for_bit_what_pytorch_s_wrapper_makes_of_its_own_tables(
    found: Found, kind: str, processes: int
) -> None:
    assert [each[kind] for each in found[f"as_pytorch:{processes}"]] == [[True] * 4] * processes


def test_with_one_process_nothing_is_spread_and_nothing_of_it_imported(found: Found) -> None:
    assert found["one_process:1"] == [{"wrong": [], "imported": []}]


@pytest.mark.parametrize(
    ("what", "said"),
    [
        (
            "other lookups",
            "rank 0 is to read rows of table 'weight' of 400 rows with table.rows (call 2); rank 1",
        ),
        ("other lookups", "rank 1 is to look up table 'weight' of 400 rows (lookup 1). All have to"),
        (
            "backward alone",
            "rank 0 is to look up table 'weight' of 400 rows (lookup 2); rank 1 is to average",
        ),
        ("deepcopy", "UsageError: deepcopy: of table 'weight' this process has the rows of rank"),
        ("pickle", "UsageError: pickle: of table 'weight' this process has the rows of rank"),
        ("state dict", "write them to files with table.export(path) or run.save(path) in all processes"),
        ("not averaged", "spread over 2 processes, has a gradient that was not averaged"),
        ("on average", "would add one that was not; it was left out. Begin to accumulate after zero_grad()"),
        (
            "grows",
            "rank 0 is to let table 'weight' grow to 500 rows (call 1); rank 1 is to let table 'weight' g",
        ),
        ("then", "rank 0 is to look up table 'weight' of 400 rows (lookup 7); rank 1 is to look up"),
        ("cannot return", "rank 1 is to close the run, and bring table 'weight' of 501 rows back (call 1)"),
        (
            "released",
            "StoreClosed: the table 'weight' was released when its run was closed, and of the 2 processes",
        ),
    ],
)
def test_what_the_processes_have_to_do_alike_and_what_parts_refuse(
    found: Found, what: str, said: str
) -> None:
    for each in found["rules:2"]:
        assert said in each[what]


def test_a_table_that_has_grown_in_one_process_alone_grows_in_the_other(found: Found) -> None:
    assert [each["one grows"] for each in found["rules:2"]] == ["BackendError: the medium is gone", "nothing"]
    assert [each["grown"] for each in found["rules:2"]] == [["nothing", 501]] * 2


@pytest.mark.parametrize("what", ["rows", "rows after", "loaded", "last writer", "a million times"])
def test_what_is_right_in_any_process(found: Found, what: str) -> None:
    assert [each[what] for each in found["rules:2"]] == [True, True]


def test_passes_are_accumulated_before_and_after_an_average(found: Found) -> None:
    assert [each["accumulated"] for each in found["rules:2"]] == [[True, 200], [True, 0]]


@pytest.mark.parametrize("clears", ["True", "False", "None"])
def test_a_pass_that_fails_loses_nothing_and_brings_nothing_back_that_was_cleared(
    found: Found, clears: str
) -> None:
    for each in found["failed:2"]:
        assert each[f"said {clears}"] == "BackendError: the medium is gone"
        assert each[clears]


def test_a_scaler_leaves_a_step_out_in_all_processes_or_in_none(found: Found) -> None:
    assert found["scaled:2"] == [{"infinite": [2.0, []], "finite": [4.0, True], "rows": True}] * 2


def test_one_that_cannot_read_its_rows_tells_those_who_asked(found: Found) -> None:
    said = [each["lookup"] for each in found["broken:2"]]
    assert said[0].startswith("TierStoreError: rank 1 could not read rows of table 'weight'")
    assert said[1] == "BackendError: the medium is gone"
    assert [each["again"] for each in found["broken:2"]] == [True, True]


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("in the midst", "UsageError: rows of tables are on their way between processes"),
        ("not the same", "UsageError: the processes have different tables: ('weight', {'num_rows': 40,"),
        (
            "not as large",
            "Build the same model everywhere: give each table the same seed, or none, and the same",
        ),
        ("dense gradient", "UsageError: '' has sparse=False: its rows are spread over the processes"),
        (
            "on the device",
            "UsageError: '' has cache_rows=8: its rows are spread over the processes, which bring",
        ),
        ("no room", "CapacityError: 1 tables need at least 64.0 KiB of host memory"),
        ("undone", "BackendError: the medium is gone"),
        ("not copied", "BackendError: the medium is gone"),
    ],
)
def test_what_cannot_be_spread_is_refused_by_name(found: Found, what: str, said: str) -> None:
    for each in found["broken:2"]:
        assert said in each[what]


def test_rows_that_were_written_before_are_spread_and_are_whole_again_if_that_fails(found: Found) -> None:
    assert [each["whole"] for each in found["broken:2"]] == [[True, True]] * 2
    assert [each["still whole"] for each in found["broken:2"]] == [[True, True]] * 2
    assert [each["kept"] for each in found["broken:2"]] == [True, True]
    assert [each["here"] for each in found["broken:2"]] == [256, 192]


def test_parts_of_a_checkpoint_are_gone_on_from(found: Found) -> None:
    for each, own in zip(found["parts_left:2"], (256, 144), strict=True):
        assert (each["anew"], each["resumed"], each["own"]) == (True, True, own)
        assert each["same model"]  # that was released
        assert (
            "the rows of the table weight begin as NormalRows(width=4, dtype=torch.float32, seed=0"
            in each["other seed"]
        )


def test_another_number_of_processes_does_not_go_on_with_parts(found: Found) -> None:
    for each in found["parts_taken:3"]:
        assert "were made by 2 processes, and these are 3" in each["beside"]
    (one,) = found["parts_taken:1"]
    assert "holds the checkpoints of 2 processes (rank-0, rank-1)" in one["beside"]
    assert one["within"].startswith(
        "UsageError: the checkpoint has the rows of the table weight that were those of rank 1 of 2, and "
        "this is one process: start 2"
    )
    assert one["unchanged"] == "True"


def test_while_a_run_is_suspended_its_tables_are_refused_and_averages_stay(found: Found) -> None:
    for rank, each in enumerate(found["suspended:2"]):
        what = ["lookup", "grow", "values wait"]
        what += [] if rank else ["rows", "set_rows", "copy_", "prefetch", "load", "step"]
        assert each["refused"] == dict.fromkeys(what, True)
        assert each["average stays"] == "nothing"
        assert (each["exported"], each["same"], each["stepped"]) == (True, True, True)


def test_a_step_that_fails_is_gone_on_with_in_columns_that_were_begun_before(found: Found) -> None:
    for each in found["gone_on_with:2"]:
        assert each == {
            "begun": [3, 3],
            "failed": "BackendError: the medium is gone",
            "once": True,
            "anew": False,
            "weights": [True, True],
            "parts": [True, True],
        }


# ---------------------------------------------------------------------- what they begin with


def test_tables_begin_as_the_first_process_has_made_and_written_them(found: Found) -> None:
    first, second = found["tables_begin:2"]
    assert (any(first["others"]), all(second["others"])) == (False, True)
    assert first["seeds"] == second["seeds"]
    for each in (first, second):
        assert (each["rows"], each["states"]) == ([True] * 5, [True] * 2)
        assert "the medium is gone" in each["undone"]
        assert each["as before"]
        assert each["gone on with"] == [True, True]
        assert "the processes have different tables: ('weight', {'num_rows': 40," in each["one seed"]
        assert "'begins': 'NormalRows(width=4, dtype=torch.float32, seed drawn" in each["one seed"]
        assert "the processes have different tables: ('weight'" in each["one state"]


# ---------------------------------------------------------------------- one that ends or fails

_LOOKUP = "is to look up table 'weight' of 400 rows (lookup {})"


@pytest.mark.parametrize(
    ("how", "what", "why"),
    [
        ("closed", _LOOKUP.format(2), "rank 2 has closed its run. All have to make the same calls"),
        ("lookup", _LOOKUP.format(2), "rank 2 has left its run with Stopped: no more data ....."),
        (
            "backward",
            "is to average the gradients of tables at the end of backward pass 1",
            "rank 2 has left",
        ),
        ("midway", _LOOKUP.format(1), "rank 2 has left its run with Stopped: just now"),
    ],
)
def test_others_are_told_who_has_ended_and_why_and_do_not_wait(
    found: Found, how: str, what: str, why: str
) -> None:
    *others, last = found["ends:3"]
    kind = "UsageError" if how == "closed" else "TierStoreError"
    for rank, each in enumerate(others):
        assert each[how].startswith(f"{kind}: rank {rank} of 3 {what}, and {why}")
        assert len(each[how]) < 600  # whatever another's error says
    assert last["closed"] == "nothing"
    assert last["midway"] == "Stopped: just now"


def test_who_was_interrupted_in_an_exchange_exchanges_nothing_any_more(found: Found) -> None:
    *others, last = found["ends:3"]
    assert last["closed, again"].startswith("StoreClosed: ")
    for each, how in ((others[0], "closed"), (others[1], "midway"), (last, "midway")):
        assert "exchanges no rows of tables any more: it was interrupted" in each[f"{how}, again"]
        assert each[how].partition(". All")[0] in each[f"{how}, again"]


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (
            "suspend",
            "rank 0 is to look up table '0.weight' of 400 rows (lookup 1); rank 1 is to call run.suspend",
        ),
        ("checkpoint", "(lookup 1); rank 1 is to call run.checkpoint (call 1)"),
        ("close", "(lookup 1); rank 1 is to close the run (call 1)"),
        ("resume", "rank 0 is to call run.checkpoint (call 1); rank 1 is to call run.resume (call 1)"),
        ("join", "table '0.weight' is looked up inside of torch's Join"),
    ],
)
def test_what_one_process_does_alone_is_said_by_all_and_they_go_on(found: Found, act: str, said: str) -> None:
    for each in found["acts:2"]:
        assert each[act].startswith("UsageError: ")
        assert said in each[act]
        assert (each["on"], each["stepped"]) == (True, True)


def test_a_lookup_takes_three_messages_a_backward_pass_three_and_one_a_table_a_step_none(
    found: Found,
) -> None:
    for each in found["acts:2"]:
        assert [each[f"messages of {what}"] for what in ("a lookup", "backward", "a step")] == [3, 4, 0]


def test_a_process_that_is_killed_is_noticed_at_once(found: Found) -> None:
    for rank, each in enumerate(found["killed:3"][:2]):
        assert each["said"].startswith(f"TierStoreError: rank {rank} of 3 {_LOOKUP.format(2)} and waited")
        assert "one of them has ended" in each["said"]
        assert "Timed out" not in each["said"]


@pytest.mark.parametrize(
    ("what", "first", "second"),
    [
        ("functions", "'begins': 'a function, 01c88af0015f7556'", "'begins': 'a function, ca23c62a92842405'"),
        ("optimizers", "'optimizer': 'SGD(lr=0.5, momentum=0.0,", "'optimizer': 'LazyAdam(lr=0.5, betas="),
        ("one optimizer", "'optimizer': 'none'", "'optimizer': 'SGD(lr=0.5,"),
        ("rates", "'optimizer': 'SGD(lr=0.5,", "'optimizer': 'SGD(lr=1.5,"),
        ("frozen", "'requires_grad': True", "'requires_grad': False"),
        ("dense", "'sparse': True", "'sparse': False"),
        ("order", "('b.weight', {", "('a.weight', {"),
    ],
)
def test_tables_that_differ_are_refused_by_all_with_what_each_has(
    found: Found, what: str, first: str, second: str
) -> None:
    said = [each[what] for each in found["tables_differ:2"]]
    begin = "UsageError: the processes have different tables: "
    for each, (mine, theirs) in zip(said, ((first, second), (second, first)), strict=True):
        assert each.startswith(begin)
        one, _, other = each.partition(" of 2, and ")
        assert (mine in one, theirs in other) == (True, True)


def test_an_optimizer_that_nobody_has_any_more_is_no_difference(found: Found) -> None:
    assert [each["nothing"] for each in found["tables_differ:2"]] == ["nothing", "nothing"]


def test_tables_come_back_whole_to_every_process_with_their_state_and_are_trained_on(found: Found) -> None:
    for each in found["returns:2"]:
        assert each["back"] == [True] * 4
        assert (each["goes on"], each["then"]) == ([True, True], [True, True])


def test_a_run_stays_open_in_all_processes_if_one_cannot_give_back_its_rows(found: Found) -> None:
    first, second = (each["cannot read"] for each in found["returns:2"])
    assert first.startswith("TierStoreError: rank 1 could not bring the rows of table 'deep.weight' back")
    assert second == "BackendError: the medium is gone"
    for each in found["returns:2"]:
        assert "beside the rows of table 'deep.weight': [3, 4] columns, by rank" in each["other states"]
    assert [each["stays"] for each in found["returns:2"]] == [[True, True]] * 2


def test_an_interrupt_as_tables_come_back_is_raised_in_one_process_and_releases_them_in_all(
    found: Found,
) -> None:
    first, second = (each["interrupted"] for each in found["returns:2"])
    assert [first[0], second[0]] == ["nothing", "interrupted"]
    assert all("was released when its run was closed" in each[1] for each in (first, second))


def test_whether_tables_fit_is_asked_for_all_rows_and_all_processes_of_the_machine(found: Found) -> None:
    assert [each["asked"] for each in found["returns:2"]] == [True, True]


def test_tables_that_one_process_has_no_room_for_are_released_by_all_and_it_is_said(found: Found) -> None:
    for each in found["returns:2"]:
        (line,) = each["logged"]
        assert line.startswith(
            "the run is closed, and the rows of 2 tables ('wide.weight', 'deep.weight') are released: they "
            "are spread over 2 processes, and do not fit into the memory of every process with room to "
            "spare. They are gone: the tiers were scratch space. Next time save them with run.save(path)"
        )
        assert each["released"].startswith("StoreClosed: the table 'deep.weight' was released when its run")
        assert each["dense"]


# ---------------------------------------------------------------------- files


def test_the_first_process_writes_all_rows_and_each_reads_its_own(found: Found) -> None:
    first, second = found["files:2"]
    for each in (first, second):
        assert each["loaded"] == [True, True]
        assert each["imported"]
        assert (
            {"deep", "saved"} <= set(each["left"]) <= {"deep", "saved", "files"}
        )  # and nothing half written
    assert first["by one"]


@pytest.mark.parametrize(
    ("what", "first", "second"),
    [
        ("there already", "UsageError: ", "TierStoreError: rank 0 could not go on: UsageError: "),
        (
            "one alone",
            "UsageError: the processes do different things",
            "UsageError: the processes do different",
        ),
        (
            "cannot read",
            "TierStoreError: rank 1 could not read rows of table",
            "BackendError: the medium is gone",
        ),
        (
            "cannot write",
            "BackendError: the disk",
            "TierStoreError: rank 0 could not go on: BackendError: the disk",
        ),
        (
            "norm",
            "UsageError: the gradient of the table 'wide.weight' is spread over the processes",
            "UsageError: the gradient of",
        ),
    ],
)
def test_who_cannot_read_or_write_tells_the_others(found: Found, what: str, first: str, second: str) -> None:
    said = [each[what] for each in found["files:2"]]
    assert said[0].startswith(first)
    assert said[1].startswith(second)


@pytest.mark.parametrize("what", ["deep", "saved"])
def test_where_one_process_finds_no_file_no_other_has_begun_to_load(found: Found, what: str) -> None:
    first, second = found["files:2"]
    assert first["not loaded"]
    assert second["not loaded"]
    assert "none'" in second[f"no {what}"]
    for each in (first[f"no {what}"], second[f"after no {what}"]):
        assert each.startswith("UsageError: the processes do different things with tables")
        assert "rank 0 is to read files into table" in each
        assert "rank 1 is to read rows of table 'deep.weight'" in each


# ---------------------------------------------------------------------- wrappers


@pytest.mark.parametrize("how", ["before", "averaged", "views"])
def test_wrapped_before_or_after_or_averaged_by_the_run_the_bits_are_the_same(found: Found, how: str) -> None:
    assert [each[how] for each in found["around:2"]] == [[], []]


@pytest.mark.parametrize("how", ["sends", "sends more"])
def test_a_wrapper_that_would_send_tables_is_refused(found: Found, how: str) -> None:
    for each in found["around:2"]:
        assert "DistributedDataParallel would send and keep all rows of the table" in each[how]


def test_wrappers_ignore_tables_as_long_as_the_run_lasts(found: Found) -> None:
    names = ["wide.weight", "deep.weight", "bags.weight"]
    assert [each["ignored"] for each in found["around:2"]] == [[names, False]] * 2


# ---------------------------------------------------------------------- gradients


def test_a_gradient_that_a_program_averages_once_more_is_refused_and_nothing_is_stepped(found: Found) -> None:
    for each in found["averaged_again:2"]:
        assert each["step"].startswith("UsageError: the gradient of table 'weight' names ")
        assert "rows that other processes have, such as " in each["step"]
        assert (each["rows"], each["stepped"]) == (True, True)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_wrapper_that_averages_over_some_of_the_processes_is_refused(found: Found, when: str) -> None:
    for count, each in zip((1, 2, 2), found["over_some:3"], strict=True):
        assert f"averages over a process group of {count} processes, and the rows of its tables" in each[when]
        assert (each["over all"], each["rows"]) == ("nothing", [True, True])


def test_steps_during_backward_are_refused_where_tables_are_averaged_at_its_end(found: Found) -> None:
    for each in found["over_some:3"]:
        assert each["early"].startswith("UsageError: optimizer_in_backward steps each parameter during backw")


@pytest.mark.parametrize("what", ["stepped", "cleared by the module", "seen"])
def test_an_average_is_there_after_a_pass_that_has_failed_until_somebody_clears_it(
    found: Found, what: str
) -> None:
    for each, count in zip(found["put_aside:2"], (20, 0), strict=True):
        assert each[f"{what}, said"] == "BackendError: the medium is gone"
        assert (each[what], each["rows there"]) == (True, count)


def test_the_run_s_no_sync_counts_when_backward_runs_as_it_does_for_what_is_dense(found: Found) -> None:
    for each in found["paused_halves:2"]:
        assert [each[f"averages, {where}"] for where in ("both", "backward", "forward")] == [1, 1, 3]
        assert (each["backward"], each["forward"]) == (True, True)


def test_a_gradient_that_nobody_has_stepped_is_there_when_a_run_has_ended(found: Found) -> None:
    assert found["at_the_end:2"] == [{"averaged": True, "own": True, "none": True}] * 2


# ---------------------------------------------------------------------- stories

_ACTS = {"_write", "_step", "_grow", "_prefetch", "_keep", "_go_back", "_export", "written"}


def test_a_table_in_parts_is_a_dense_tensor_through_everything_that_is_done_with_it(found: Found) -> None:
    for each in found["stories:2"]:
        assert set(each) == _ACTS
        assert each["written"] > 1_000_000


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("processes", [2, 4])
def test_many_stories(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, processes: int
) -> None:
    monkeypatch.setenv("TIERSTORE_STORIES", "60")
    name = f"stories:{processes}"
    for each in led(tmp_path_factory.mktemp("ranks"), name)[name]:
        assert not isinstance(each, str), each
        assert set(each) == _ACTS
