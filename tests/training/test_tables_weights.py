"""``offload(..., weights=...)`` of a model with tables: no table is ever held whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.training.table_models import build, rows_of, table_config
from tests.training.twins import every_layout
from tierstore.errors import UsageError
from tierstore.formats.safetensors_files import HeaderEntry, TensorFile, write_file
from tierstore.nn import EmbeddingTable
from tierstore.training import offload

OFF = {"memory_offload": "OFF"}
MIB = 1 << 20


def _write(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    write_file(path, [HeaderEntry.of(*each) for each in tensors.items()], tensors.values(), {})


def _saved(path: Path) -> dict[str, torch.Tensor]:
    """Write weights of a model of clicks in two files; return them."""
    model, _ = build()
    made = {
        name: torch.randn(each.shape) if each.dim() else each.clone()
        for name, each in model.state_dict().items()
    }
    path.mkdir()
    names = sorted(made)
    for number, part in enumerate((names[:3], names[3:])):
        _write(path / f"part-{number}.safetensors", {name: made[name] for name in part})
    return made


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the bytes of each call that reads a file, of tensors or of their rows."""
    sizes: list[int] = []
    read = TensorFile._read

    def noted(self: TensorFile, *args: object) -> torch.Tensor:
        found: torch.Tensor = read(self, *args)  # type: ignore[arg-type]
        sizes.append(found.nbytes)
        return found

    monkeypatch.setattr(TensorFile, "_read", noted)
    return sizes


@every_layout
def test_tables_get_their_rows_from_a_file(layout: str, tmp_path: Path) -> None:
    saved = _saved(tmp_path / "weights")
    model, optimizers = build()
    with offload(
        model, optimizers, table_config(layout, tmp_path / "run"), weights=tmp_path / "weights"
    ) as run:
        found = rows_of(model)
        run.store.check()
    for rows, name in zip(found, ("wide.weight", "deep.weight"), strict=True):
        assert torch.equal(rows, saved[name])
    assert torch.equal(model.dense[1].weight, saved["dense.1.weight"])  # type: ignore[arg-type]


def test_without_a_run_too(tmp_path: Path) -> None:
    saved = _saved(tmp_path / "weights")
    model, optimizers = build()
    with offload(model, optimizers, OFF, weights=tmp_path / "weights"):
        assert torch.equal(rows_of(model)[1], saved["deep.weight"])


@pytest.mark.parametrize("config", [OFF, None], ids=["off", "disk"])
def test_a_table_is_read_a_few_megabytes_at_a_time(
    config: dict[str, object] | None, tmp_path: Path, reads: list[int]
) -> None:
    rows = torch.randn(60_000, 48)
    assert rows.nbytes > 10 * MIB
    _write(tmp_path / "weights.safetensors", {"weight": rows})
    table = EmbeddingTable(60_000, 48)
    config = config or table_config("disk", tmp_path / "run", {"offload_disk_size": "64MB"})
    with offload(table, None, config, weights=tmp_path / "weights.safetensors"):
        some = torch.arange(0, 60_000, 7)
        assert torch.equal(table.rows(some), rows[some])
    assert sum(reads) == rows.nbytes
    assert max(reads) <= 4 * MIB


def test_two_names_of_a_table_are_compared_a_few_megabytes_at_a_time(
    tmp_path: Path, reads: list[int]
) -> None:
    rows = torch.randn(60_000, 48)
    model = torch.nn.ModuleList([EmbeddingTable(60_000, 48)] * 2)
    _write(tmp_path / "equal.safetensors", {"0.weight": rows, "1.weight": rows})
    with offload(model, None, OFF, weights=tmp_path / "equal.safetensors"):
        pass
    assert max(reads) <= 4 * MIB
    other = rows.clone()
    other[-1, -1] += 1
    _write(tmp_path / "other.safetensors", {"0.weight": rows, "1.weight": other})
    with pytest.raises(UsageError, match=r"0\.weight and 1\.weight are one tensor .* values differ"):
        offload(model, None, OFF, weights=tmp_path / "other.safetensors")
    _write(tmp_path / "dtype.safetensors", {"0.weight": rows, "1.weight": rows.double()})
    with pytest.raises(UsageError, match=r"0\.weight and 1\.weight are one tensor"):
        offload(model, None, OFF, weights=tmp_path / "dtype.safetensors")


def test_what_is_of_another_shape_is_refused_before_a_row_changes(tmp_path: Path) -> None:
    saved = _saved(tmp_path / "weights")
    _write(tmp_path / "weights" / "part-1.safetensors", {**_rest(saved), "wide.weight": torch.zeros(7, 1)})
    model, optimizers = build()
    expected = rows_of(model)
    with pytest.raises(UsageError, match=r"wide\.weight is \[7, 1\], the model's is \[6000, 1\]"):
        offload(model, optimizers, table_config("disk", tmp_path / "run"), weights=tmp_path / "weights")
    for rows, wanted in zip(rows_of(model), expected, strict=True):
        assert torch.equal(rows, wanted)


def _rest(saved: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: saved[name] for name in sorted(saved)[3:]}
