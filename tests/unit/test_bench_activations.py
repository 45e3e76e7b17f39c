"""The activation figures at a small scale: what they count, what they compare, and that they catch faults."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench import activations, batches, paced
from bench.activations import planned_saving_bytes, saving_activations
from bench.batches import Case, largest
from bench.command import Settings, UnmeasurableError
from bench.links import A100, LLAMA_7B, Accelerator, Layer, least_step
from bench.llamas import Manner, Size, Trainee, marks, peak
from bench.paced import NONE, Rounds, computing_beside_copies, equal_losses, in_paced_turns

SMALL = Size(64, 2, 3, 2, 64)
MEASURABLE = {name: each for name, each in activations.QUESTIONS.items() if name != "swap-save-on-cpu"}
WITHIN = {
    "swap-peak": (0.3, 0.9),
    "swap-plan": (0, 5),
    "swap-step": (0.1, 1000),  # so small a step tells nothing, but that it was made
    "swap-and-recompute": (0.1, 1000),
    "swap-leaks": (0, 0),
    "resnet50-batch": (1, 2),
}
"""What each comes to at a fiftieth of its scale."""


@pytest.mark.slow
@pytest.mark.parametrize("name", MEASURABLE)
def test_each_question_yields_its_figure_with_details(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "MOST", 2)
    figure = MEASURABLE[name](Settings(tmp_path, repeats=1, warmups=0, scale=0.02))
    assert figure.name == name
    assert figure.details
    least, most = WITHIN[name]
    assert least <= figure.reached <= most


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure")
def test_without_a_gpu_the_comparison_with_save_on_cpu_says_so(tmp_path: Path) -> None:
    with pytest.raises(UnmeasurableError, match="CUDA"):
        activations.swap_save_on_cpu(Settings(tmp_path))


@pytest.mark.gpu
def test_with_a_gpu_swap_is_compared_with_save_on_cpu(tmp_path: Path) -> None:
    figure = activations.swap_save_on_cpu(Settings(tmp_path, repeats=1, warmups=0, scale=0.1))
    assert figure.reached > 0


# ---------------------------------------------------------------------- the model's bytes


@pytest.mark.parametrize("size", [SMALL, Size(64, 4, 2, 1, 96), Size(128, 2, 2, 4, 32)], ids=str)
def test_the_marked_bytes_are_those_that_are_swapped(size: Size) -> None:
    with Trainee(size, Manner(swap=marks(1))) as trainee:
        trainee.step()
        assert trainee.swap is not None
        assert trainee.swap.stats().activations.kept_bytes == size.marked_bytes


def test_marks_of_some_layers_swap_their_share() -> None:
    with Trainee(SMALL, Manner(swap=marks(1, range(2)))) as trainee:
        trainee.step()
        assert trainee.swap is not None
        assert trainee.swap.stats().activations.kept_bytes * SMALL.layers == 2 * SMALL.marked_bytes


@pytest.mark.slow
def test_the_planned_saving_is_what_comes_off_the_peak() -> None:
    size = Size(256, 4, 2, 2, 512)
    plain, ours = (peak(size, manner).nbytes for manner in (Manner(), Manner(swap=marks(1))))
    assert ours == pytest.approx(plain - planned_saving_bytes(size), rel=0.01)


def test_a_size_keeps_its_proportions_and_gets_its_share_of_tokens() -> None:
    assert Size.scaled(1) == Size()
    half = Size.scaled(0.5)
    assert (half.dim, half.tokens) == (Size().dim, Size().tokens // 2)
    assert Size.scaled(0.01).tokens < 200


# ---------------------------------------------------------------------- what is compared


MANNERS = {
    "swapped": Manner(swap=marks(3)),
    "behind a link": Manner(swap=marks(3), link=50_000_000),
    "recomputed": Manner(is_checkpointed=True),
    "both": activations.mix(SMALL),
    "bound by a quota": activations.all_marked(SMALL),
    "saved on the CPU": Manner(around=lambda model: saving_activations(model, pin_memory=False)),
}


@pytest.mark.parametrize("manner", MANNERS.values(), ids=MANNERS.keys())
def test_trainees_see_the_same_batches_and_have_the_same_losses(manner: Manner) -> None:
    with Trainee(SMALL, Manner()) as plain, Trainee(SMALL, manner) as ours:
        for _ in range(2):
            plain.step()
            ours.step()
        assert torch.equal(plain.losses, ours.losses)
        assert plain.losses[0] != plain.losses[1]


def test_different_losses_fail_the_run() -> None:
    with pytest.raises(AssertionError, match="losses differ"):
        equal_losses(torch.tensor([1.0]), torch.tensor([1.5]))


def test_the_mix_swaps_less_than_all_and_makes_the_rest_again() -> None:
    size = replace(SMALL, layers=8)
    both = activations.mix(size)
    kept = []
    for each in (replace(both, recompute=None), both):
        with Trainee(size, each) as trainee:
            trainee.step()
            assert trainee.swap is not None
            kept.append(trainee.swap.stats().activations.kept_bytes)
    assert kept[1] < 0.7 * kept[0]


def test_a_quota_bounds_what_is_swapped_and_on_the_device() -> None:
    size = Size(64, 2, 6, 2, 256)
    free, bound = (Manner(swap=marks(60), quota=each) for each in (None, size.marked_bytes // 4))
    saved_bytes = peak(size, free).nbytes - peak(size, bound).nbytes
    assert saved_bytes > size.marked_bytes // 4


def test_save_on_cpu_is_spared_the_parameters() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    packed = []
    hooks = saving_activations(model, pin_memory=False)
    own = {id(parameter) for parameter in model.parameters()}

    def pack(tensor: torch.Tensor) -> object:
        result = hooks.pack_hook(tensor)
        packed.append((tensor, result))
        return result

    with torch.autograd.graph.saved_tensors_hooks(pack, hooks.unpack_hook):
        model(torch.randn(2, 4)).sum().backward()
    is_saved = {id(tensor._base if tensor._is_view() else tensor): type(result) for tensor, result in packed}
    assert {type_ for key, type_ in is_saved.items() if key in own} == {torch.Tensor}
    assert {type_ for key, type_ in is_saved.items() if key not in own} == {tuple}


# ---------------------------------------------------------------------- the link beside computing


def test_a_layer_of_llama_7b_swaps_129_kb_a_token_for_1_4_billion_operations() -> None:
    assert LLAMA_7B.swapped_bytes == 2 * (5 * 4096 + 4 * 11008) + 128
    assert LLAMA_7B.operations == pytest.approx(6 * 202.4e6 + 12 * 4096 * 4096, rel=1e-3)


def test_the_share_is_moving_time_over_computing_time() -> None:
    layer = Layer(dim=10, hidden=20, heads=0, length=0)  # 260 B and 6,000 operations a token
    slow = Accelerator("slow", operations_a_s=12_000, utilisation=0.5, link=260)
    assert slow.share(layer) == pytest.approx(1.0)
    assert replace(slow, link=520).share(layer) == pytest.approx(0.5)
    assert replace(slow, utilisation=1.0).share(layer) == pytest.approx(2.0)


def test_the_share_of_an_a100_at_half_its_rate_is_more_than_a_forward() -> None:
    assert A100.share(LLAMA_7B) == pytest.approx(0.569, abs=0.001)
    assert "50%" in str(A100)


@pytest.mark.parametrize(("share", "forward", "least"), [(0.2, 0.3, 1.0), (0.5, 0.3, 1.2), (0.8, 0.3, 1.6)])
def test_a_link_hides_behind_computing_in_either_half(share: float, forward: float, least: float) -> None:
    assert least_step(share, forward) == pytest.approx(least)


def test_rounds_are_paced_by_the_step_with_nothing_swapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    steps_s = iter([2.0, 1.0, 1.02])

    def turns(_size: Size, manners: Mapping[str, Manner], _settings: Settings) -> Rounds:
        asked.extend(each.link for each in manners.values() if each.link is not None)
        step_s = next(steps_s)
        return Rounds({NONE: [step_s]}, {NONE: [step_s / 3]}, {}, "")

    monkeypatch.setattr(paced, "in_turns", turns)
    monkeypatch.setattr(paced, "_pace", lambda _size: 1.0)
    on_link = lambda link: {NONE: Manner(), "swapped": Manner(link=link)}  # noqa: E731
    link, rounds = in_paced_turns(SMALL, 0.5, on_link, Settings(tmp_path))
    wished = [round(SMALL.marked_bytes / (0.5 * step_s)) for step_s in (1.0, 2.0, 1.0)]
    assert asked == wished
    assert link.share == pytest.approx(0.5 / 1.02, rel=1e-3)
    assert rounds.forward_share == pytest.approx(1 / 3)


def test_a_machine_that_keeps_no_pace_is_no_place_to_measure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps_s = itertools.cycle([2.0, 1.0])
    turns = lambda *_: Rounds({NONE: [next(steps_s)]}, {NONE: [0.3]}, {}, "")  # noqa: E731
    monkeypatch.setattr(paced, "in_turns", turns)
    monkeypatch.setattr(paced, "_pace", lambda _size: 1.0)
    with pytest.raises(UnmeasurableError, match=r"was to take 0\.50"):
        in_paced_turns(SMALL, 0.5, lambda _: {NONE: Manner()}, Settings(tmp_path))


def test_one_core_is_left_to_what_copies() -> None:
    before = torch.get_num_threads()
    with computing_beside_copies() as threads:
        assert torch.get_num_threads() == threads <= max(1, len(os.sched_getaffinity(0)) - 1)
    assert torch.get_num_threads() == before


# ---------------------------------------------------------------------- the largest batch


@pytest.mark.parametrize("limit", [4, 5, 7, 8, 63, 64, 100, 1000])
def test_the_search_finds_the_largest_batch_up_to_a_sixteenth(limit: int) -> None:
    found = largest(lambda batch: batch <= limit, least=4)
    assert found <= limit
    assert limit - found <= max(1, limit // 16)


def test_a_search_ends_where_it_is_told_and_says_when_nothing_fits() -> None:
    assert largest(lambda _: True, least=3, most=20) == 20
    assert largest(lambda _: False, least=3) == 0


def test_a_search_tries_few_batches() -> None:
    tried = []

    def fits(batch: int) -> bool:
        tried.append(batch)
        return batch <= 777

    largest(fits)
    assert len(tried) <= 16
    assert max(tried) <= 2 * 777


@pytest.mark.slow
def test_with_memory_offload_a_batch_fits_that_does_not_without() -> None:
    case = Case(16, 12 * 1024**2, (1, 1))
    assert case.fits(4, "OFF")
    assert case.losses(4, "ON") == case.losses(4, "OFF")
    assert not case.fits(64, "OFF")
    assert case.fits(64, "ON")


def test_what_fails_for_another_reason_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> list[float]:
        raise ZeroDivisionError

    monkeypatch.setattr(Case, "losses", broken)
    case = Case(16, 1024)
    ask: Callable[[], bool] = lambda: case.fits(1, "ON")  # noqa: E731
    with pytest.raises(ZeroDivisionError):
        ask()
