"""Adapters of PEFT on an offloaded base: the same bits, and the base is only ever read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.integrations import tiny
from tests.training.twins import same
from tierstore.training import offload

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
pytest.importorskip("transformers")

_ADAPTERS: Mapping[str, Mapping[str, object]] = {
    "lora": {},
    "dora": {"use_dora": True},
    "saved": {"modules_to_save": ["lm_head"]},
    "dropout": {"lora_dropout": 0.2},
}


def _model(kind: str, dtype: torch.dtype = torch.float32) -> Any:
    base = tiny.model_of("llama").to(dtype)
    settings = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], **_ADAPTERS[kind])
    torch.manual_seed(1)
    return peft.get_peft_model(base, settings, autocast_adapter_dtype=False)


def _losses(model: Any, optimizer: torch.optim.Optimizer, steps: int) -> Iterator[Tensor]:
    for row in tiny.rows(steps, 1):
        loss = model(**{name: each[None] for name, each in row.items()}).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.detach()


@pytest.mark.parametrize("ends", ["unloaded", "merged inside", "merged after"])
@pytest.mark.parametrize(("kind", "layout"), list(zip(_ADAPTERS, tiny.LAYOUTS, strict=True)))
def test_adapters_have_the_bits_that_they_have_without(
    kind: str, layout: str, ends: str, tmp_path: Path
) -> None:
    def trained(config: Any) -> list[Tensor]:
        model = _model(kind, torch.bfloat16 if kind == "lora" else torch.float32)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        with offload(model, optimizer, config):
            found = [*_losses(model, optimizer, 3)]
            if ends == "merged inside":
                model.merge_adapter()
                found.append(model(**{k: v[None] for k, v in tiny.rows(1, 2)[0].items()}).loss)
                model.unmerge_adapter()
            found += _losses(model, optimizer, 1)
        if ends == "merged after":
            model = model.merge_and_unload()
        elif ends == "unloaded":
            model = model.unload()
        return [*found, *model.state_dict().values()]

    plain = trained({"memory_offload": "OFF"})
    ours = trained(tiny.config_of(layout, tmp_path))
    assert [number for number, pair in enumerate(zip(plain, ours, strict=True)) if not same(*pair)] == []


def test_a_frozen_base_is_never_written_back(tmp_path: Path) -> None:
    model = _model("lora")
    adapters = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.SGD(adapters, lr=1e-2)
    base_bytes = sum(each.nbytes for each in model.parameters() if not each.requires_grad)
    config = tiny.config_of("device", tmp_path, max_device_memory="96KB", auto_offload=True)
    with offload(model, optimizer, config) as run:
        [*_losses(model, optimizer, 2)]
        before = run.store.stats()
        [*_losses(model, optimizer, 4)]
        after = run.store.stats()

        def moved(source: str, target: str) -> int:
            one, other = (each.traffic.get((source, target)) for each in (before, after))
            return (0 if other is None else other.nbytes) - (0 if one is None else one.nbytes)

        assert moved("host", "device") > 4 * base_bytes // 2
        # What comes back is adapters and their gradients, once or twice a step.
        assert moved("device", "host") <= 4 * 3 * sum(each.nbytes for each in adapters)
        assert moved("device", "host") < base_bytes


def test_adapters_are_saved_alone_from_inside_a_run(tmp_path: Path) -> None:
    import safetensors.torch

    saved = {}
    for name, config in (("plain", {"memory_offload": "OFF"}), ("ours", tiny.config_of("three", tmp_path))):
        model = _model("dora")
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        with offload(model, optimizer, config):
            [*_losses(model, optimizer, 2)]
            model.save_pretrained(tmp_path / name)
        saved[name] = safetensors.torch.load_file(tmp_path / name / "adapter_model.safetensors")
    assert saved["plain"].keys() == saved["ours"].keys()
    assert all("lora_" in name for name in saved["ours"])
    assert all(torch.equal(each, saved["ours"][name]) for name, each in saved["plain"].items())


def test_a_trainer_saves_adapters_and_takes_the_best_up_again_without_reading_the_base(
    tmp_path: Path,
) -> None:
    seen: list[tuple[str, int]] = []

    def counted(name: str) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            before = _read_bytes(self.tierstore.run)
            found = getattr(Trainer, name)(self, *args, **kwargs)
            seen.append((name, _read_bytes(self.tierstore.run) - before))
            return found

        return call

    from transformers import Trainer

    from tierstore.integrations.transformers import offloading

    model = _model("lora")
    names = ("_save", "_load_best_model")
    counting: Any = type("Counting", (Trainer,), {name: counted(name) for name in names})
    settings: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps"}
    trainer = offloading(counting, tiny.config_of("disk", tmp_path, buffer_min_size="1KB"))(
        model=model,
        args=tiny.arguments(tmp_path, eval_steps=2, load_best_model_at_end=True, **settings),
        train_dataset=tiny.rows(12, 1),
        eval_dataset=tiny.rows(2, 2),
    )
    trainer.train()
    adapters = sum(each.nbytes for each in model.parameters() if each.requires_grad)
    base = sum(each.nbytes for each in model.parameters() if not each.requires_grad)
    assert {name for name, _ in seen} == set(names)
    assert [pair for pair in seen if pair[1] > 3 * adapters] == []
    assert 3 * adapters < base


def _read_bytes(run: Any) -> int:
    traffic = run.store.stats().traffic
    return sum(each.nbytes for (_, target), each in traffic.items() if target == "caller")


@pytest.mark.parametrize("how", ["callback", "class"])
def test_a_trainer_trains_adapters_and_takes_them_up_again(how: str, tmp_path: Path) -> None:
    def trained(config: Any, path: Path) -> tiny.Trained:
        found = []
        for resumes in (False, True):
            trainer = tiny.makers(config, how)(
                model=_model("lora"),
                args=tiny.arguments(path, save_strategy="steps", save_steps=2),
                train_dataset=tiny.rows(12, 1),
            )
            trainer.train(resume_from_checkpoint=str(path / "output" / "checkpoint-2") if resumes else None)
            found.append(tiny.outcome_of(trainer, path))
        whole, resumed = (each.tensors for each in found)
        assert all(same(each, resumed[name]) for name, each in whole.items())
        return found[-1]

    plain = trained(None, tmp_path / "plain")
    ours = trained(tiny.config_of("three", tmp_path), tmp_path / "ours")
    assert tiny.differences(plain, ours) == []
