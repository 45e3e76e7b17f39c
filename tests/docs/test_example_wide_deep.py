"""The Wide&Deep example: its model, its command line, and all of it in small."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.docs.test_example_wide_deep_criteo import some_lines, write
from tests.sampling import too_long_for_ci
from train_wide_deep import main
from wide_deep import PlainTables, TieredTables, WideDeep, WideDeepShape, groups_of, halved
from wide_deep_job import command_line, read_job
from wide_deep_planted import PlantedClicks
from wide_deep_steps import optimizers_of, train_step

TINY = [
    *("--device", "emulated", "--vocabulary", "2000", "--dimension", "8", "--width", "64"),
    *("--batch-size", "128", "--test-lines", "2048", "--max-device-memory", "16MB"),
    *("--offload-cpu-size", "16MB", "--offload-disk-size", "64MB"),
]
SMALL = WideDeepShape(vocabulary=500, dimension=4, hidden=halved(16))


def _trained(compute_dtype: torch.dtype, steps: int = 3) -> tuple[WideDeep, list[float]]:
    torch.manual_seed(0)
    shape = WideDeepShape(SMALL.vocabulary, SMALL.fields, SMALL.dimension, SMALL.hidden, compute_dtype)
    model, clicks = WideDeep(shape, TieredTables()), PlantedClicks(SMALL.vocabulary, 64)
    optimizers = optimizers_of(groups_of(model))
    losses = [train_step(model, optimizers, clicks.batch(1, step)).deep.item() for step in range(steps)]
    return model, losses


# ---------------------------------------------------------------------- the model


def test_the_default_shape_is_the_original_s() -> None:
    shape = WideDeepShape()
    assert shape.layers == (3120, 1024, 512, 256, 128, 1)
    assert halved(1024) == shape.hidden
    assert shape.table_bytes == 200_000 * 81 * 4


def test_the_shape_counts_what_the_model_has() -> None:
    model = WideDeep(SMALL, TieredTables())
    tables = [model.wide_table, model.deep_table]
    in_tables = [parameter for table in tables for parameter in table.parameters()]
    assert sum(parameter.nbytes for parameter in in_tables) == SMALL.table_bytes
    others = sum(parameter.numel() for parameter in model.parameters()) - SMALL.table_bytes // 4
    assert others == SMALL.dense_parameters


def test_tables_of_pytorch_begin_with_the_same_rows_and_another_seed_with_others() -> None:
    ids = torch.arange(50)
    tiered, plain, other = (make(50, 4)(ids) for make in (TieredTables(1), PlainTables(1), TieredTables(2)))
    assert torch.equal(tiered, plain)
    assert not torch.equal(tiered, other)
    many = TieredTables()(20_000, 4).rows(torch.arange(20_000))
    assert float(many.std()) == pytest.approx(0.01, rel=0.02)
    wide, deep = TieredTables()(50, 1)(ids), TieredTables()(50, 4)(ids)
    assert not torch.equal(wide, deep[:, :1])


@pytest.mark.parametrize("width", [0, 4, 12, -8])
def test_a_width_that_cannot_be_halved_is_refused(width: int) -> None:
    with pytest.raises(ValueError, match=f"multiple of 8, .* not {width}"):
        halved(width)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_hidden_layers_compute_in_half_and_parameters_stay_whole(dtype: torch.dtype) -> None:
    seen = set()

    def look(_module: nn.Module, _inputs: object, output: torch.Tensor) -> None:
        seen.add(output.dtype)

    handle = nn.modules.module.register_module_forward_hook(look)
    try:
        model, losses = _trained(dtype)
    finally:
        handle.remove()
    assert seen == {torch.float32, dtype}  # tables and the whole; layers
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert losses == pytest.approx(_trained(torch.float32)[1], abs=2e-3)
    assert losses != _trained(torch.float32)[1]


def test_losses_that_are_scaled_keep_small_gradients_of_half_precision() -> None:
    """Without the scale they are below what float16 can say, and become 0."""
    torch.manual_seed(0)
    shape = WideDeepShape(SMALL.vocabulary, SMALL.fields, SMALL.dimension, SMALL.hidden, torch.float16)
    model, batch = WideDeep(shape, TieredTables()), PlantedClicks(SMALL.vocabulary, 4096).batch(1, 0)
    counts = []
    for scale in (1.0, 1024.0):
        model.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(model(batch.ids, batch.weights), batch.labels)
        loss.backward(torch.tensor(scale))
        gradients = [parameter.grad for parameter in model.deep_layers.parameters()]
        counts.append(sum(int(each.count_nonzero()) for each in gradients if each is not None))
    assert 0 < counts[0] < counts[1] / 2


# ---------------------------------------------------------------------- all of it


def test_it_learns_and_equals_plain_pytorch_in_tiers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*TINY, "--steps", "100", "--compare", "--offload-path", str(tmp_path / "tiers")]) == 0
    text = capsys.readouterr().out
    assert "100 of 100 steps have equal losses, bit for bit" in text
    assert "the AUC is equal" in text
    assert re.search(r"^epoch: 1 step: 100, wide_loss is 0\.\d+, deep_loss is 0\.\d+$", text, re.MULTILINE)
    found, planted = map(float, re.findall(r"AUC (0\.\d+), of the planted model (0\.\d+)", text)[0])
    assert 0.62 < found < planted < 0.9


@pytest.mark.parametrize(
    "words",
    [["--dense"], ["--compute", "float16"], ["--compute", "bfloat16", "--epochs", "2"]],
)
def test_every_variant_equals_plain_pytorch(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, *words, "--steps", "4", "--compare"]) == 0
    text = capsys.readouterr().out
    count = 4 * (2 if "--epochs" in words else 1)
    assert f"{count} of {count} steps have equal losses, bit for bit" in text
    wide, deep = map(float, re.findall(r"wide_loss is (\S+), deep_loss is (\S+)$", text, re.MULTILINE)[0])
    assert (deep > wide) is ("--dense" in words)


@too_long_for_ci
def test_tables_of_ten_times_the_host_quota_train_from_disk(capsys: pytest.CaptureFixture[str]) -> None:
    """Rows and their optimizers' state take 13 MB."""
    words = [*TINY, "--vocabulary", "64000", "--dimension", "16", "--width", "32", "--batch-size", "64"]
    words += ["--offload-cpu-size", "1230KB", "--max-device-memory", "64MB", "--steps", "10"]
    assert main([*words, "--compare"]) == 0
    text = capsys.readouterr().out
    host, disk = (
        float(re.findall(rf"the store had at most ([\d.]+) MiB in '{tier}'", text)[0])
        for tier in ("host", "disk")
    )
    assert host <= 1230 / 1024
    assert disk > 10 * host
    assert "10 of 10 steps have equal losses, bit for bit" in text
    assert "the AUC is equal" in text


@too_long_for_ci
def test_it_trains_on_criteo_s_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "train.txt", some_lines(900))
    words = [*TINY, "--data", str(path), "--vocabulary", "5000", "--record-lines", "50"]
    assert main([*words, "--compare"]) == 0
    text = capsys.readouterr().out
    assert "Wide&Deep learns 800 lines of train.txt" in text
    assert "6 of 6 steps have equal losses, bit for bit" in text
    auc = re.findall(r"^AUC 0\.\d+$", text, re.MULTILINE)
    assert len(auc) == 2
    assert main([*words, "--workers", "1"]) == 0
    assert re.findall(r"^AUC 0\.\d+$", capsys.readouterr().out, re.MULTILINE) == auc[:1]


def test_a_vocabulary_is_what_the_files_have(tmp_path: Path) -> None:
    path = write(tmp_path / "train.txt", some_lines(900))
    words = ["--data", str(path), "--record-lines", "50", "--batch-size", "64", "--device", "emulated"]
    job = read_job(command_line().parse_args(words), tmp_path)
    assert job.shape.vocabulary == job.clicks.vocabulary > 39
    ids = torch.cat([batch.ids for batch in job.batches(1)])
    assert len(ids) == 800 - 800 % 64
    assert int(ids.max()) < job.shape.vocabulary


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["--steps", "0"], "--steps must be at least 1"),
        (["--workers", "-1"], "--workers must be at least 0, not -1"),
        (["--width", "12"], "multiple of 8"),
        (["--vocabulary", "12"], "the vocabulary must be 39 to"),
        (["--zipf", "-1"], "at least 0, not -1"),
        (["--compute", "int8"], "int8"),
        (["--max-device-memory", "4XB"], "'4XB'"),
        (["--device", "tpu"], "emulated, cuda or cuda:N"),
        (["--data", "/no/such/file"], "/no/such/file"),
    ],
)
def test_a_wrong_word_is_answered_in_one_line_with_exit_code_2(
    words: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--device", "emulated", *words])
    assert ended.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert hint in lines[0]


@pytest.mark.parametrize(
    ("content", "words", "hint"),
    [
        ("0\t1\n", [], "train.txt, line 1: has 2 fields between tabs"),
        ("", [], "0 lines in 0 records"),
        (None, ["--vocabulary", "39"], "--vocabulary 39, but the files have"),
        (None, ["--batch-size", "5000"], "--batch-size 5000, but there are 800 lines to train on"),
        (None, ["--record-lines", "1000"], "900 lines in 1 records"),
    ],
)
def test_wrong_data_are_answered_in_one_line(
    content: str | None, words: list[str], hint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "train.txt"
    if content is None:
        write(path, some_lines(900))
    else:
        path.write_text(content)
    with pytest.raises(SystemExit):
        main(["--device", "emulated", "--data", str(path), "--record-lines", "50", *words])
    (line,) = capsys.readouterr().err.splitlines()
    assert hint in line


def test_a_device_too_small_is_a_failure_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, "--max-device-memory", "32KB"]) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("train_wide_deep")]
    assert "CapacityError" in line
