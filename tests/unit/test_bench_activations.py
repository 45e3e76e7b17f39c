"""The activation figures at a small scale: what they count, what they compare, and that they catch faults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench import activations, batches
from bench.activations import planned_saving_bytes, saving_activations
from bench.batches import Case, largest
from bench.command import Question, Settings, UnmeasurableError
from bench.links import A100, LLAMA_7B, Accelerator, Layer, least_step
from bench.llamas import Manner, Size, Trainee, marks, peak

SMALL = Size(64, 2, 3, 2, 64)
MEASURABLE = {name: each for name, each in activations.QUESTIONS.items() if name != "swap-save-on-cpu"}


@pytest.mark.slow
@pytest.mark.parametrize("question", MEASURABLE.values(), ids=MEASURABLE.keys())
def test_each_question_yields_its_figure_with_details(
    question: Question, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "MOST", 2)
    figure = question(Settings(tmp_path, repeats=1, warmups=0, scale=0.02))
    assert MEASURABLE[figure.name] is question
    assert figure.reached >= 0
    assert figure.details


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
    "both": Manner(swap=marks(3, [0, 1]), recompute=activations.MIX_RECOMPUTE),
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
        activations._check(torch.tensor([1.0]), torch.tensor([1.5]))


def test_the_mix_swaps_less_than_all_and_makes_the_rest_again() -> None:
    size = replace(SMALL, layers=8)
    manner = Manner(swap=activations.MIX_SWAP)
    kept = []
    for each in (manner, replace(manner, recompute=activations.MIX_RECOMPUTE)):
        with Trainee(size, each) as trainee:
            trainee.step()
            assert trainee.swap is not None
            kept.append(trainee.swap.stats().activations.kept_bytes)
    assert kept[1] < 0.7 * kept[0]


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
