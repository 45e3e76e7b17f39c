"""The training and inference peers: the same numbers from each, and what they are held against."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import distributed

from bench.peers import command, inference, inferrers, shard_peers, training, zero
from bench.peers.inference import Inferred
from bench.peers.training import Trained, compare_losses
from bench.peers.turns import Turns
from bench.peers.usage import Usage
from bench.peers.workers import Absent
from bench.record import Verdict
from bench.workload import BATCH, Workload, least_written_bytes
from tests.sampling import too_long_for_ci

MIB = 1024**2


def _trained(seconds: list[float], *, peak_bytes: int = 100 * MIB, written_bytes: int = 0) -> Trained:
    taken = [Usage(each, each, 0, written_bytes) for each in seconds]
    return Trained(Turns(1, taken, 0, peak_bytes), peak_bytes, [1.0])


# ---------------------------------------------------------------------- losses


def test_losses_of_plain_pytorch_and_ours_have_to_be_equal_in_every_bit() -> None:
    with pytest.raises(AssertionError, match="tierstore and plain differ"):
        compare_losses({"plain": [2.0, 1.0], "tierstore": [2.0, math.nextafter(1.0, 2.0)]})
    head, _, ours = compare_losses({"plain": [2.0, 1.0], "tierstore": [2.0, 1.0]})
    assert ours[head.index("largest difference from plain")] == "none, bit for bit"


def test_losses_of_another_library_may_round_otherwise_but_not_differ() -> None:
    compare_losses({"plain": [2.0, 1.0], "deepspeed": [2.0, 1.0005]})
    with pytest.raises(AssertionError, match="deepspeed"):
        compare_losses({"plain": [2.0, 1.0], "deepspeed": [2.0, 1.002]})
    with pytest.raises(AssertionError, match="deepspeed"):
        compare_losses({"plain": [2.0, 1.0], "deepspeed": [2.0, math.nan]})


def test_whoever_trained_fewer_steps_is_not_equal() -> None:
    with pytest.raises(AssertionError, match="tierstore"):
        compare_losses({"plain": [2.0, 1.0], "tierstore": [2.0]})


# ---------------------------------------------------------------------- what it comes to


@pytest.mark.parametrize(("quota_bytes", "least_bytes"), [(0, 400), (40, 360), (399, 1), (400, 0), (999, 0)])
def test_what_exists_at_the_end_of_backward_and_exceeds_the_quota_has_to_be_written(
    quota_bytes: int, least_bytes: int
) -> None:
    assert least_written_bytes(100, quota_bytes) == least_bytes


def test_bytes_written_are_held_against_the_least() -> None:
    workload = Workload(256)
    least = least_written_bytes(workload.parameter_bytes, MIB)
    found = {"tierstore": _trained([1.0], written_bytes=2 * least)}
    (figure,) = training.figures(found, workload, MIB)
    assert figure.name == "peers-bytes-written"
    assert figure.reached == pytest.approx(2.0)
    without = training.least_without_gradients_bytes(workload.parameter_bytes, MIB)
    assert without == least - workload.parameter_bytes
    assert figure.details["if gradients did not count"].startswith(f"{2 * least / without:.2f} x")


def test_a_step_is_held_against_the_faster_deepspeed() -> None:
    found = {
        "tierstore": _trained([1.0, 1.0]),
        "deepspeed": _trained([4.0, 4.0]),
        "deepspeed-pipelined": _trained([2.0, 2.0]),
    }
    figure = training.figures(found, Workload(256), 10**12)[0]
    assert figure.name == "peers-step"
    assert figure.reached == pytest.approx(0.5)
    assert figure.verdict is Verdict.BAR


def test_a_step_with_more_memory_than_the_peer_s_does_not_count() -> None:
    found = {"tierstore": _trained([1.0], peak_bytes=101 * MIB), "deepspeed": _trained([9.0])}
    figure = training.figures(found, Workload(256), 10**12)[0]
    assert figure.verdict is Verdict.MISSED
    assert "--host-quota" in figure.details["peak memory, tierstore and deepspeed"]


def test_the_quota_shrinks_with_the_model() -> None:
    usual = training.usual(Path("x"))
    assert usual.quota_bytes == training.FULL_HOST_BYTES
    assert replace(usual, dim=512).quota_bytes == training.FULL_HOST_BYTES // 4
    assert replace(usual, host_bytes=7).quota_bytes == 7


def test_a_pass_is_held_against_cold_pages() -> None:
    def inferred(seconds: float) -> Inferred:
        return Inferred(Turns(2, [Usage(seconds, 0.0, 0, 0)], 0, 0), "same")

    found = {"tierstore": inferred(1.0), "accelerate-cold": inferred(3.0), "accelerate-warm": inferred(0.5)}
    (figure,) = inference.figures(found)
    assert figure.reached == pytest.approx(3.0)
    assert figure.verdict is Verdict.MISSED
    assert figure.aim == inference.BAR
    (figure,) = inference.figures({**found, "read-alone": inferred(0.6)})
    assert figure.aim == pytest.approx(5.0), "as fast as the disk"
    assert figure.details["times as fast as it is with the whole model in the page cache"] == "0.5"
    assert inference.figures({"tierstore": inferred(1.0)}) == []


def test_outputs_that_differ_fail_the_run() -> None:
    with pytest.raises(AssertionError, match="differ"):
        inference.compare_outputs({"plain": "a", "tierstore": "b"})


def test_the_digest_is_of_what_the_model_computes(tmp_path: Path) -> None:
    passes = inferrers.Passes("plain")
    passes("prepare", {"dim": 64, "path": str(tmp_path), "host_bytes": 0})
    passes("turn", {"passes": 2})
    model, chance, digest = Workload(64).new_model(), torch.Generator().manual_seed(1), hashlib.sha256()
    with torch.no_grad():
        for _ in range(2):
            digest.update(model(torch.randn(BATCH, 64, generator=chance)).numpy().tobytes())
    assert passes("finish", {}) == {"digest": digest.hexdigest()}


# ---------------------------------------------------------------------- DeepSpeed's configuration


def test_deepspeed_gets_the_buffers_that_its_pipeline_asserts_and_no_clipping(tmp_path: Path) -> None:
    for is_pipelined, buffers in ((False, 4), (True, 12)):
        settings = zero.configuration(Workload(512), tmp_path, is_pipelined=is_pipelined)
        stage = settings["zero_optimization"]
        assert isinstance(stage, dict)
        assert stage["offload_optimizer"]["buffer_count"] == buffers
        assert stage["offload_param"]["buffer_size"] >= 4 * 512 * 512
        assert settings["gradient_clipping"] == 0
        json.dumps(settings)


def test_a_model_that_deepspeed_would_keep_in_memory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Absent, match="under 1 MiB"):
        zero.ZeroTrainee(Workload(128), tmp_path / "zero", is_pipelined=False)


# ---------------------------------------------------------------------- several ranks


def test_ranks_add_up_bytes_and_processor_time_and_the_slowest_is_waited_for() -> None:
    def answer(seconds: float, loss: float) -> dict[str, object]:
        usage = Usage(seconds, 1.0, 10, 20).to_mapping()
        return {"usage": usage, "steps": 5, "peak_bytes": 7, "losses": [loss, loss / 2]}

    both = shard_peers.together([answer(3.0, 1.0), answer(4.0, 8.0)])
    assert both["usage"] == Usage(4.0, 2.0, 20, 40).to_mapping()
    assert (both["steps"], both["peak_bytes"], both["losses"]) == (5, 14, [1.0, 0.5, 8.0, 4.0])


def test_deepspeed_is_told_of_all_ranks_batches(tmp_path: Path) -> None:
    settings = zero.configuration(Workload(512), tmp_path, is_pipelined=False, ranks=2)
    assert settings["train_batch_size"] == 2 * BATCH
    assert settings["train_micro_batch_size_per_gpu"] == BATCH


def test_a_model_whose_shards_deepspeed_would_keep_in_memory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Absent, match="under 1 MiB"):
        zero.ZeroTrainee(Workload(320), tmp_path / "zero", is_pipelined=False, ranks=2)


# ---------------------------------------------------------------------- whole


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "peers"),
    [
        ("training", "plain,tierstore,deepspeed"),
        ("inference", "plain,tierstore,read-alone"),
        pytest.param(
            "shards",
            "plain,tierstore",
            marks=[
                pytest.mark.long,
                pytest.mark.skipif(not distributed.is_available(), reason="PyTorch was built without it"),
            ],
        ),
    ],
)
@too_long_for_ci
def test_a_whole_comparison_runs_and_is_recorded(name: str, peers: str, tmp_path: Path) -> None:
    words = [name, "--dim", "128", "--steps", "2", "--repeats", "1", "--warmups", "0", "--write"]
    words += ["--peers", peers, "--path", str(tmp_path / "disk"), "--results", str(tmp_path)]
    command.main(words)
    recorded = json.loads((tmp_path / f"peers-{name}.json").read_text())
    assert {job["jobname"] for job in recorded["jobs"]} >= {"plain", "tierstore"}
    assert "deepspeed" not in {job["jobname"] for job in recorded["jobs"]}
    assert ("deepspeed" in recorded["left_out"]) == (name == "training")
    assert f"## {name}" in (tmp_path / "peers.md").read_text()
