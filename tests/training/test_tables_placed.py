"""How much of host memory tables have: read in ``run.placement``, and set there."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from tests.training.table_models import STEPPERS, assert_alike, build, plain, step, table_config
from tests.training.twins import Trial, every_layout
from tierstore.errors import CapacityError, ConfigError
from tierstore.nn import EmbeddingTable
from tierstore.planning import Placement
from tierstore.training import Offload, offload

NAMES = ["wide.weight", "deep.weight"]


def _open(layout: str, path: Path, tables: object = None, **more: object) -> tuple[Trial, Offload]:
    trial = Trial(*build())
    placement = {} if tables is None else {"placement": {"tables": tables}}
    config = table_config(layout, path, {**placement, **more})
    trial.run = offload(trial.model, trial.optimizers, config)
    return trial, trial.run


@every_layout
def test_a_run_says_how_much_each_table_has(layout: str, tmp_path: Path) -> None:
    _, run = _open(layout, tmp_path)
    with run:
        tables = run.placement.tables
        assert list(tables) == NAMES
        for name in NAMES:
            assert tables[name].frames == run.store.spec(f"table/{name}/frames").nbytes
            assert f"table '{name}': frames of" in str(run.placement)
        given = run.placement.to_mapping()
        bundles = dict(run.placement.bundles)
    assert Placement.from_mapping(given).tables == tables
    _, again = _open(layout, tmp_path / "again", given["tables"])
    with again:
        assert again.placement.tables == tables
        assert dict(again.placement.bundles) == bundles


@pytest.mark.parametrize("layout", ["disk", "three"])
def test_a_table_has_what_it_is_given_and_the_others_share_the_rest(layout: str, tmp_path: Path) -> None:
    expected = plain(4)
    _, usual = _open(layout, tmp_path / "usual")
    with usual:
        before = usual.placement.tables
    trial, run = _open(layout, tmp_path, {"deep.weight": {"frames": "40KB"}})
    with run:
        assert run.placement.tables["deep.weight"].frames == 40 << 10
        assert run.stats().tables["deep.weight"].frames == (40 << 10) // 4032
        assert run.placement.tables["wide.weight"].frames >= before["wide.weight"].frames
        torch.manual_seed(1)
        for _ in range(4):
            step(trial)
        run.store.check()
    assert_alike(expected, trial)


def test_frames_of_a_table_that_is_not_there_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tables\[depe\]: .* no such table; it has wide\.weight, deep\.w"):
        _open("disk", tmp_path, {"depe": {"frames": "40KB"}})
    with pytest.raises(ConfigError, match="the model has no such table"):
        offload(
            torch.nn.Linear(2, 2),
            None,
            table_config("disk", tmp_path, {"placement": {"tables": {"a": {"frames": 1}}}}),
        )


def test_more_than_there_is_is_refused_with_numbers(tmp_path: Path) -> None:
    with pytest.raises(CapacityError, match=r"1 tables need at least 1\.0 GiB of host memory"):
        _open("disk", tmp_path, {"deep.weight": {"frames": "1GB"}})
    with pytest.raises(CapacityError, match=r"1 tables need at least 64\.0 KiB"):
        _open("disk", tmp_path, {"deep.weight": {"frames": "112KB"}}, offload_cpu_size="208KB")


def test_what_is_less_than_a_page_is_a_page(tmp_path: Path) -> None:
    _, run = _open("disk", tmp_path, {"deep.weight": {"frames": 1}})
    with run:
        assert run.placement.tables["deep.weight"].frames == 4096
        assert run.stats().tables["deep.weight"].frames == 1


@every_layout
def test_the_line_of_an_opening_counts_tables(
    layout: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "tierstore"):
        _, run = _open(layout, tmp_path)
    run.close()
    (said,) = [each.message for each in caplog.records if "is offloaded with" in each.message]
    assert ", 2 tables of 3.4 MiB in frames of " in said
    assert "deep" not in said


def test_what_checkpoints_need_counts_tables(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def said(disk: str, path: Path) -> list[str]:
        caplog.clear()
        table = EmbeddingTable(6000, 48)
        optimizer = STEPPERS["SparseAdam"]([table.weight])
        more = {"durable": True, "offload_disk_size": disk}
        offload(table, optimizer, table_config("disk", path, more)).close()
        return [each.message for each in caplog.records if "a checkpoint keeps" in each.message]

    assert said("8MB", tmp_path / "large") == []
    (small,) = said("5MB", tmp_path / "small")
    assert "keeps 3.3 MiB in 'disk', 3.3 MiB of that of tables when all of their rows have been used" in small
