"""What a Trainer cannot do offloaded is refused, and the error names the line to change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.integrations import tiny
from tierstore.errors import CapacityError, UsageError

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

pytestmark = pytest.mark.filterwarnings("ignore:.*lm_head.*:UserWarning")

HOW = pytest.mark.parametrize("how", ["callback", "class"])


@dataclass(frozen=True)
class Mistake:
    """What a user does, and what the error has to say.

    Attributes:
        says: parts of the message: what is wrong, and the line to change.
        model: makes the model, given a folder.
        change: changes the arguments of the Trainer when they have been checked.
        optimizer: makes an optimizer before the Trainer is made.
    """

    says: tuple[str, ...]
    model: Callable[[Path], nn.Module] = lambda _: tiny.model_of("llama")
    change: Callable[[Any], None] = lambda _: None
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None


def _sees_two_devices(arguments: Any) -> None:
    arguments._n_gpu = 2  # as it counts them itself where there are two


def _has_deepspeed(arguments: Any) -> None:
    arguments.deepspeed = {"zero_optimization": {"stage": 2}}  # which is taken only where the package is


def _on_disk(path: Path) -> nn.Module:
    """Return a model whose layers accelerate brings from a disk in each call."""
    from transformers import LlamaForCausalLM

    tiny.model_of("llama").save_pretrained(path / "model")  # type: ignore[operator]  # of transformers
    placed = {"model.layers": "disk", "model.embed_tokens": "cpu", "model.norm": "cpu"}
    placed |= {"model.rotary_emb": "cpu", "lm_head": "cpu"}
    model: nn.Module = LlamaForCausalLM.from_pretrained(
        path / "model", device_map=placed, offload_folder=str(path / "kept")
    )
    return model


def _on_two_devices(_: Path) -> nn.Module:
    model = tiny.model_of("llama")
    model.hf_device_map = {"model": 0, "lm_head": 1}  # type: ignore[assignment]  # as from_pretrained does
    return model


def _with(parameter: Callable[[Tensor], nn.Parameter]) -> Callable[[Path], nn.Module]:
    def made(_: Path) -> nn.Module:
        model: Any = tiny.model_of("llama")
        model.lm_head.weight = parameter(model.lm_head.weight.detach())
        return model  # type: ignore[no-any-return]  # of transformers

    return made


def _of_package(module: str, name: str) -> Callable[[Tensor], nn.Parameter]:
    """Return what makes a parameter of a class that is told by its module alone: neither package is here."""
    kind = type(name, (nn.Parameter,), {"__module__": module})

    def made(values: Tensor) -> nn.Parameter:
        parameter: nn.Parameter = kind(values.to(torch.int8), requires_grad=False)
        return parameter

    return made


def _wrapped_for_two(_: Path) -> nn.Module:
    wrapped = nn.DataParallel(tiny.model_of("llama"))
    wrapped.device_ids = [0, 1]  # which it finds itself where there are two
    return wrapped


def _without_values(_: Path) -> nn.Module:
    return tiny.without_values()


def _of_another(_: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(tiny.model_of("gpt2").parameters(), lr=1e-2)


def _before_replacement(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for module in model.modules():
        for name, each in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(each.detach().clone()))
    return optimizer


MISTAKES: Mapping[str, Mistake] = {
    "deepspeed": Mistake(("TrainingArguments(deepspeed=...)", "Leave deepspeed out"), change=_has_deepspeed),
    "several devices": Mistake(
        ("DataParallel", "torchrun", "CUDA_VISIBLE_DEVICES=0"), change=_sees_two_devices
    ),
    "device_map with a disk": Mistake(("hooks of accelerate", "Load the model without device_map"), _on_disk),
    "device_map of two devices": Mistake(("device_map over 0, 1", "from_pretrained(path)"), _on_two_devices),
    "bitsandbytes in 4 bits": Mistake(
        ("'lm_head.weight'", "Params4bit of bitsandbytes: quantised", "ignored=[...]"),
        _with(_of_package("bitsandbytes.nn.modules", "Params4bit")),
    ),
    "bitsandbytes in 8 bits": Mistake(
        ("'lm_head.weight'", "Int8Params of bitsandbytes: quantised", "bfloat16"),
        _with(_of_package("bitsandbytes.nn.modules", "Int8Params")),
    ),
    "torchao": Mistake(
        ("'lm_head.weight'", "AffineQuantizedTensor of torchao: quantised", "ignored=[...]"),
        _with(_of_package("torchao.dtypes.affine", "AffineQuantizedTensor")),
    ),
    "wrapped for two devices": Mistake(
        ("the model is a DataParallel on several devices", "one process for each device"), _wrapped_for_two
    ),
    "all of it frozen": Mistake(
        ("no parameter of the LlamaForCausalLM requires a gradient", "requires_grad_(True)"),
        lambda _: tiny.model_of("llama").requires_grad_(requires_grad=False),
    ),
    "optimizer of another model": Mistake(
        ("SGD trains no parameter", "optimizers=(optimizer, None)"), optimizer=_of_another
    ),
    "optimizer made before": Mistake(
        ("SGD trains no parameter", "model.parameters() as they are now"), optimizer=_before_replacement
    ),
}


def _made(mistake: Mistake, how: str, path: Path) -> Any:
    model = mistake.model(path)
    arguments = tiny.arguments(path, max_steps=1, remove_unused_columns=False)
    optimizer = None if mistake.optimizer is None else mistake.optimizer(model)
    mistake.change(arguments)
    return tiny.makers(tiny.config_of("device", path), how)(
        model=model,
        args=arguments,
        train_dataset=tiny.rows(4, 1),
        eval_dataset=tiny.rows(4, 2),
        optimizers=(optimizer, None),
    )


@HOW
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_refused_before_the_first_step_with_the_line_to_change(
    name: str, how: str, tmp_path: Path
) -> None:
    mistake = MISTAKES[name]
    with pytest.raises(UsageError) as raised:  # noqa: PT012 - the one refuses when it is made
        trainer = _made(mistake, how, tmp_path)
        trainer.train()
    assert [each for each in mistake.says if each not in str(raised.value)] == []


@pytest.mark.parametrize("name", ["device_map with a disk", "device_map of two devices", "torchao"])
def test_evaluating_offloaded_refuses_the_same(name: str, tmp_path: Path) -> None:
    mistake = MISTAKES[name]
    trainer = _made(mistake, "class", tmp_path)
    with pytest.raises(UsageError) as raised:
        trainer.evaluate()
    assert [each for each in mistake.says if each not in str(raised.value)] == []


@HOW
@pytest.mark.parametrize("means", ["deepspeed", "fsdp"])
def test_what_accelerate_launch_has_chosen_is_refused(
    means: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = tiny.arguments(tmp_path)  # made before: it would ask for the package
    trainer = tiny.makers(tiny.config_of("host", tmp_path), "callback")(
        model=tiny.model_of("llama"), args=arguments, train_dataset=tiny.rows(4, 1)
    )
    monkeypatch.setenv(f"ACCELERATE_USE_{means.upper()}", "true")
    with pytest.raises(UsageError, match=rf"accelerate launch \(ACCELERATE_USE_{means.upper()}\)"):
        trainer.train() if how == "callback" else refused_arguments(arguments)


def refused_arguments(arguments: Any) -> None:
    """Do what the class does when it has been made."""
    from tierstore.integrations.transformers.callback import refuse_arguments

    refuse_arguments(arguments)


def test_a_model_without_values_says_what_to_pass(tmp_path: Path) -> None:
    trainer = _made(Mistake((), _without_values), "class", tmp_path)
    with pytest.raises(UsageError, match=r"on the meta device and has no values; pass weights=\.\.\."):
        trainer.train()


@HOW
def test_a_device_map_of_one_device_is_no_mistake(how: str, tmp_path: Path) -> None:
    model: Any = tiny.model_of("llama")
    model.hf_device_map = {"": "cpu"}
    trainer = _made(Mistake((), lambda _: model), how, tmp_path)
    trainer.train()
    assert trainer.state.global_step == 1


# ---------------------------------------------------------------------- a batch that does not fit


def _larger_batches_fail(trainer: Any, largest: int) -> list[int]:
    """Let batches larger than a number be out of memory; return what sizes are tried, as they are."""
    tried: list[int] = []

    def looked_at(module: nn.Module, args: tuple[Any, ...], given: Mapping[str, Tensor]) -> None:
        del module, args
        size = given["input_ids"].shape[0]
        if size not in tried:
            tried.append(size)
        if size > largest:
            raise torch.OutOfMemoryError("the device is out of memory.")

    trainer.model.register_forward_pre_hook(looked_at, with_kwargs=True)
    return tried


def _searching(config: Any, path: Path, **told: Any) -> Any:
    return tiny.makers(config, "class")(
        model=tiny.model_of("llama"),
        args=tiny.arguments(
            path, max_steps=2, auto_find_batch_size=True, per_device_train_batch_size=16, **told
        ),
        train_dataset=tiny.rows(200, 1),
    )


def test_a_batch_for_which_the_tiers_have_no_room_is_made_smaller_by_auto_find_batch_size(
    tmp_path: Path,
) -> None:
    config = {**tiny.config_of("device", tmp_path), "max_device_memory": "160KB"}
    ours = _searching(config, tmp_path / "ours")
    tried = _larger_batches_fail(ours, 16)
    ours.train()
    assert tried[0] == 16
    assert 1 < tried[-1] < 16
    plain = _searching(None, tmp_path / "plain")
    assert _larger_batches_fail(plain, tried[-1]) == []
    plain.train()
    found = tiny.outcome_of(plain, tmp_path / "plain"), tiny.outcome_of(ours, tmp_path / "ours")
    assert tiny.differences(*found) == []


def test_where_no_batch_fits_the_error_is_that_of_the_tiers(tmp_path: Path) -> None:
    config = {**tiny.config_of("device", tmp_path), "max_device_memory": "40KB"}
    trainer = _searching(config, tmp_path)
    with pytest.raises(CapacityError, match="'device'"):
        trainer.train()


_OUTGROWN: Mapping[str, Callable[[Any], object]] = {
    "cast": lambda model: model.bfloat16(),
    "resized": lambda model: model.resize_token_embeddings(80, mean_resizing=False),
}


@HOW
@pytest.mark.parametrize("change", _OUTGROWN)
def test_a_model_that_outgrew_the_optimizers_state_is_refused_and_the_line_that_is_named_works(
    change: str, how: str, tmp_path: Path
) -> None:
    def trained(config: Any, path: Path) -> tiny.Trained:
        trainer = tiny.makers(config, how)(
            model=tiny.model_of("llama"),
            args=tiny.arguments(path, max_steps=2),
            train_dataset=tiny.rows(8, 1),
        )
        trainer.train()
        torch.manual_seed(7)
        _OUTGROWN[change](trainer.model)
        if config is not None:  # the Trainer alone raises, or writes beyond its state: fused AdamW does
            with pytest.raises(UsageError, match=r"keeps 'exp_avg' of .*: the model was resized or cast"):
                trainer.train()
        trainer.optimizer = None
        trainer.train()
        return tiny.outcome_of(trainer, path)

    plain = trained(None, tmp_path / "plain")
    ours = trained(tiny.config_of("three", tmp_path), tmp_path / "ours")
    assert tiny.differences(plain, ours) == []
