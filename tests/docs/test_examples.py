"""The example that `make run` runs: its model, its text, its verdicts, and all of it in small."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from device_budget import moved_to_device
from llama import Llama, LlamaConfig, rotary_tables, rotate
from llama_job import command_line, documentation_text, draw_batches, read_job
from llama_report import History, print_losses, print_peak
from tierstore.testing.memory import DeviceBudget
from train_llama import main, run_without_offload

SMALL = LlamaConfig(dim=32, layers=2, heads=2)

TINY = [
    *("--device", "emulated", "--steps", "3", "--layers", "3", "--dim", "128", "--heads", "4"),
    *("--batch-size", "2", "--sequence-length", "16"),
    *("--max-device-memory", "4MB", "--offload-cpu-size", "4MB", "--offload-disk-size", "32MB"),
]


def small_model(config: LlamaConfig = SMALL) -> Llama:
    torch.manual_seed(0)
    return Llama(config)


def gradients(config: LlamaConfig, tokens: torch.Tensor) -> list[torch.Tensor]:
    model = small_model(config)
    model(tokens).square().mean().backward()
    found = [parameter.grad for parameter in model.parameters()]
    assert all(gradient is not None for gradient in found)
    return [gradient for gradient in found if gradient is not None]


# ---------------------------------------------------------------------- the model


def test_the_model_has_as_many_parameters_as_its_config_says() -> None:
    assert sum(parameter.numel() for parameter in small_model().parameters()) == SMALL.parameters


def test_the_default_model_has_about_25_million_parameters() -> None:
    assert 24e6 < LlamaConfig().parameters < 27e6


def test_names_are_those_of_published_checkpoints() -> None:
    names = {name for name, _ in small_model().named_parameters()}
    layer = ["attention.wq", "attention.wk", "attention.wv", "attention.wo", "attention_norm", "ffn_norm"]
    layer += ["feed_forward.w1", "feed_forward.w2", "feed_forward.w3"]
    expected = {f"layers.{index}.{name}.weight" for index in range(2) for name in layer}
    assert names == expected | {"tok_embeddings.weight", "norm.weight", "output.weight"}


def test_no_position_sees_what_comes_after_it() -> None:
    model = small_model()
    tokens = torch.arange(12).view(1, 12)
    changed = tokens.clone()
    changed[0, 8:] += 100
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :8], after[:, :8])
    assert not torch.allclose(before[:, 8:], after[:, 8:])


def test_rotated_products_depend_on_the_distance_alone() -> None:
    query, key = torch.randn(2, 8, dtype=torch.float64).unbind()
    cosines, sines = rotary_tables(10, 8, torch.device("cpu"))

    def product(query_position: int, key_position: int) -> torch.Tensor:
        turned = [
            rotate(x, cosines[p].double(), sines[p].double())
            for x, p in ((query, query_position), (key, key_position))
        ]
        return turned[0] @ turned[1]

    torch.testing.assert_close(product(7, 4), product(3, 0), rtol=1e-5, atol=1e-6)
    assert not torch.isclose(product(7, 4), product(7, 5), rtol=1e-3)


def test_recomputed_activations_give_the_gradients_of_kept_ones() -> None:
    tokens = torch.arange(24).view(2, 12)
    kept = gradients(replace(SMALL, is_recomputed=False), tokens)
    recomputed = gradients(replace(SMALL, is_recomputed=True), tokens)
    assert all(torch.equal(a, b) for a, b in zip(kept, recomputed, strict=True))


@pytest.mark.parametrize("sizes", [{"dim": 0}, {"heads": 3}, {"layers": -1}])
def test_sizes_that_make_no_model_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must"):
        replace(SMALL, **sizes)  # type: ignore[arg-type]  # all of these fields are ints


# ---------------------------------------------------------------------- the text


def test_the_default_text_is_prose_and_is_not_ours() -> None:
    text = documentation_text()
    assert len(text) > 100_000
    assert b"The" in text
    assert not any(Path(__file__).parent.parent.parent.joinpath("docs/examples").glob("*.txt"))


def test_a_target_is_the_byte_after_its_token() -> None:
    text = bytes(range(100))
    ((tokens, targets),) = draw_batches(text, steps=1, batch_size=3, length=7, seed=0)
    assert tokens.shape == targets.shape == (3, 7)
    assert torch.equal(targets, tokens + 1)


def test_the_last_byte_of_the_text_can_be_a_target() -> None:
    ((_, targets),) = draw_batches(b"abcd", steps=1, batch_size=64, length=3, seed=0)
    assert (targets[:, -1] == ord("d")).all()


def test_the_same_seed_draws_the_same_batches() -> None:
    text = documentation_text()
    first, again, other = (draw_batches(text, 2, 2, 8, seed)[1][0] for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


# ---------------------------------------------------------------------- verdicts


def history(loss: float, weight: float) -> History:
    return History([1.0, loss], [0.1, 0.1], {"w": torch.tensor([weight])})


@pytest.mark.parametrize(
    ("loss", "weight", "is_equal"),
    [(0.5, 2.0, True), (0.5000000000000001, 2.0, False), (0.5, 2.0000002, False)],
)
def test_one_different_bit_is_a_difference(
    loss: float, weight: float, is_equal: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert print_losses(history(loss, weight), history(0.5, 2.0)) is is_equal
    assert ("DIFFERENT" in capsys.readouterr().out) is (loss != 0.5)


@pytest.mark.parametrize(("peak_bytes", "is_within"), [(100, True), (101, False)])
def test_a_byte_over_the_budget_is_over(
    peak_bytes: int, is_within: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert print_peak(peak_bytes, 100) is is_within
    assert ("OVER" in capsys.readouterr().out) is not is_within


# ---------------------------------------------------------------------- all of it


def test_a_model_that_is_moved_to_the_emulated_device_takes_its_budget() -> None:
    model = small_model()
    with DeviceBudget("1MB") as budget:
        moved = moved_to_device(model, torch.device("cpu"))
        assert budget.live_bytes == sum(parameter.nbytes for parameter in moved.parameters()) > 0


def test_without_offloading_the_budget_is_not_enough(tmp_path: Path) -> None:
    job = read_job(command_line().parse_args(TINY), tmp_path)
    error = run_without_offload(job)
    assert error is not None
    assert "out of device memory" in error
    assert "4.0 MiB" in error


def test_the_example_trains_equal_within_its_budget_over_three_tiers(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([*TINY, "--offload-path", str(tmp_path / "tiers")]) == 0
    text = capfd.readouterr().out
    assert "OutOfDeviceMemory" in text
    assert text.count(" equal\n") == 3
    assert "within the budget of 4.0 MiB" in text
    for tier in ("device", "host", "disk"):
        (row,) = [line.split() for line in text.splitlines() if line.split()[:1] == [tier]]
        assert row[3] != "0.0", f"{tier} was never used: {row}"
    assert "times" in text.splitlines()[-1]
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["--steps", "0"], "--steps must be at least 1"),
        (["--heads", "7"], "multiple of twice the heads"),
        (["--max-device-memory", "4XB"], "'4XB'"),
        (["--offload-cpu-size", "4XB", "--offload-disk-size", "-1"], "2 faults"),
        (["--text", "/no/such/file"], "/no/such/file"),
        (["--device", "tpu"], "emulated, cuda or cuda:N"),
        (["--sequence-length", "9999999"], "needs more than that"),
        (["--unheard-of"], "--unheard-of"),
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


def test_a_budget_too_small_for_one_module_is_a_failure_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*TINY, "--max-device-memory", "64KB", "--offload-path", str(tmp_path)]
    assert main(words) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("train_llama")]
    assert "CapacityError" in line
