"""Models of transformers come from files or a configuration without ever being whole in memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

pytest.importorskip("transformers")

import transformers

from tests.integrations.transformers_kinds import BUILDS, built, llama, loss_of, tiers
from tests.sampling import too_long_for_ci
from tests.training.twins import LAYOUTS, assert_equal_models, every_layout
from tierstore.errors import UsageError
from tierstore.integrations.transformers_models import from_config, from_pretrained
from tierstore.training import offload
from tierstore.units import MIB

every_kind = pytest.mark.parametrize("kind", BUILDS)


def saved(kind: str, path: Path, shard: str = "20KB") -> transformers.PreTrainedModel:
    """Write a model in shards; return it."""
    model = built(kind)
    model.save_pretrained(path, max_shard_size=shard)
    return model


def steps(model: transformers.PreTrainedModel, optimizer: torch.optim.Optimizer) -> list[float]:
    torch.manual_seed(3)  # of dropout
    losses = []
    for seed in range(3):
        loss = loss_of(model, seed)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@every_kind
@pytest.mark.parametrize("layout", ["three", "disk"] if "disk" in LAYOUTS else list(LAYOUTS))
def test_a_model_from_shards_trains_as_transformers_own(kind: str, layout: str, tmp_path: Path) -> None:
    saved(kind, tmp_path / "model")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 1
    plain = type(built(kind)).from_pretrained(tmp_path / "model").train()
    expected = steps(plain, torch.optim.Adam(plain.parameters(), lr=1e-2))
    model, weights = from_pretrained(tmp_path / "model")
    assert not model.training
    assert all(each.is_meta for each in model.parameters())
    assert not any(each.is_meta for each in model.buffers())
    optimizer = torch.optim.Adam(model.train().parameters(), lr=1e-2)
    with offload(model, optimizer, tiers(layout, tmp_path), weights=weights):
        assert steps(model, optimizer) == expected
    assert_equal_models(plain, model)
    assert model.generation_config.to_dict() == plain.generation_config.to_dict()


@pytest.mark.parametrize("kind", ["tied llama", "gpt2", "t5"])
def test_tied_weights_that_the_files_leave_out_stay_one(kind: str, tmp_path: Path) -> None:
    saved(kind, tmp_path / "model", "1MB")
    assert "lm_head.weight" not in load_file(tmp_path / "model" / "model.safetensors")
    model, weights = from_pretrained(tmp_path / "model")
    with offload(model, None, tiers(next(iter(LAYOUTS)), tmp_path), weights=weights):
        assert model.lm_head.weight is model.get_input_embeddings().weight
    assert model.lm_head.weight is model.get_input_embeddings().weight


def test_weights_are_read_as_often_as_a_run_is_opened(tmp_path: Path) -> None:
    plain = saved("llama", tmp_path / "model")
    model, weights = from_pretrained(tmp_path / "model")
    for _ in range(2):
        with offload(model, None, tiers(next(iter(LAYOUTS)), tmp_path), weights=weights):
            pass
        assert_equal_models(plain, model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@every_kind
def test_another_type_is_that_of_transformers(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Parts of some models, as of T5, stay in 32 bits."""
    saved(kind, tmp_path / "model")
    plain = BUILDS[kind]()[0].from_pretrained(tmp_path / "model", dtype=dtype)
    model, weights = from_pretrained(tmp_path / "model", dtype=dtype)
    with offload(model, None, tiers(next(iter(LAYOUTS)), tmp_path), weights=weights), torch.no_grad():
        assert torch.equal(loss_of(model, 0), loss_of(plain, 0))
    assert_equal_models(plain, model)


def test_files_of_the_bare_model_fit_the_one_with_a_head_and_the_other_way_round(tmp_path: Path) -> None:
    plain: Any = built("gpt2")
    plain.transformer.save_pretrained(tmp_path / "bare")
    plain.save_pretrained(tmp_path / "whole")
    for name, model_class in (("bare", transformers.GPT2LMHeadModel), ("whole", transformers.GPT2Model)):
        model, weights = from_pretrained(tmp_path / name, model_class=model_class)
        with offload(model, None, tiers(next(iter(LAYOUTS)), tmp_path), weights=weights):
            pass
        assert_equal_models(plain if name == "bare" else plain.transformer, model)


def test_tables_that_older_files_hold_are_left_out(tmp_path: Path) -> None:
    for kind, added in (
        ("llama", {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}),
        ("gpt2", {"transformer.h.0.attn.bias": torch.ones(2, 2)}),
    ):
        plain = saved(kind, tmp_path / kind, "1MB")
        path = tmp_path / kind / "model.safetensors"
        save_file(load_file(path) | added, path, {"format": "pt"})
        model, weights = from_pretrained(tmp_path / kind)
        with offload(model, None, tiers(next(iter(LAYOUTS)), tmp_path), weights=weights):
            pass
        assert_equal_models(plain, model)


def test_names_that_do_not_fit_are_listed(tmp_path: Path) -> None:
    saved("llama", tmp_path / "model", "1MB")
    path = tmp_path / "model" / "model.safetensors"
    state = load_file(path)
    state["model.layers.0.stranger.weight"] = state.pop("model.norm.weight")
    save_file(state, path, {"format": "pt"})
    model, weights = from_pretrained(tmp_path / "model")
    with pytest.raises(UsageError, match=r"missing: model\.norm\.weight; not in the model: .*stranger"):
        offload(model, None, tiers(next(iter(LAYOUTS)), tmp_path), weights=weights)


def test_a_name_that_would_be_looked_for_elsewhere_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nothing is downloaded"):
        from_pretrained("openai-community/gpt2")
    with pytest.raises(UsageError, match="nothing is downloaded"):
        from_config(tmp_path)


def test_a_quantised_model_is_refused_by_name(tmp_path: Path) -> None:
    saved("llama", tmp_path / "model", "1MB")
    path = tmp_path / "model" / "config.json"
    path.write_text(
        json.dumps(
            json.loads(path.read_text()) | {"quantization_config": {"quant_method": "gptq", "bits": 4}}
        )
    )
    with pytest.raises(UsageError, match="quantization_config"):
        from_pretrained(tmp_path / "model")


def test_a_configuration_that_names_no_architecture_asks_for_the_class() -> None:
    with pytest.raises(UsageError, match="model_class="):
        from_config(llama())


def test_experts_that_transformers_merges_are_refused_by_name(tmp_path: Path) -> None:
    config = transformers.MixtralConfig(
        vocab_size=61, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=2,
    )  # fmt: skip
    transformers.MixtralForCausalLM(config).save_pretrained(tmp_path / "model")
    with pytest.raises(UsageError, match="computes tensors of MixtralForCausalLM"):
        from_pretrained(tmp_path / "model")


# ---------------------------------------------------------------------- initial values


@every_kind
@every_layout
def test_a_model_of_a_configuration_begins_with_values_like_those_of_transformers(
    kind: str, layout: str, tmp_path: Path
) -> None:
    model_class, config = BUILDS[kind]()
    plain = dict(built(kind).named_parameters())
    found = []
    for _ in range(2):
        torch.manual_seed(5)
        model, weights = from_config(config, model_class=model_class)
        assert model.training
        with offload(model, None, tiers(layout, tmp_path), weights=weights):
            pass
        found.append(model)
    assert_equal_models(*found)
    for name, parameter in found[0].named_parameters():
        other = plain[name]
        assert parameter.std().item() == pytest.approx(other.std().item(), rel=0.35, abs=1e-8), name
        assert parameter.mean().item() == pytest.approx(
            other.mean().item(), abs=4 * other.std().item() + 1e-8
        ), name
    assert not any(torch.equal(a, plain[name]) for name, a in found[0].named_parameters() if a.std() > 0)


# ---------------------------------------------------------------------- memory


@pytest.mark.slow
@pytest.mark.parametrize(("what", "times"), [("files", 2.5), ("configuration", 2.0)])
def test_a_model_of_several_times_the_memory_is_opened(what: str, times: float, tmp_path: Path) -> None:
    nbytes, needed_bytes = _needed(what, tmp_path)
    assert nbytes > times * needed_bytes


@pytest.mark.slow
@too_long_for_ci
def test_saving_a_model_in_shards_takes_the_memory_of_about_one_shard(tmp_path: Path) -> None:
    nbytes, needed_bytes = _needed("saved", tmp_path)
    shards = [each.stat().st_size for each in (tmp_path / "saved").glob("*.safetensors")]
    assert sum(shards) > nbytes
    assert len(shards) > 10
    assert max(shards) < needed_bytes < 2 * max(shards) + 16 * MIB  # a piece of the run's memory


def _needed(what: str, tmp_path: Path) -> tuple[int, int]:
    """Return the bytes of a model, and what memory it took to do something with it in tiers."""
    config = llama(
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=16,
        vocab_size=4000,
        architectures=["LlamaForCausalLM"],
    )
    if what == "files":
        torch.manual_seed(0)
        transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model", max_shard_size="40MB")
    else:
        config.save_pretrained(tmp_path / "model")
    done = subprocess.run(
        [sys.executable, "-m", "tests.integrations.transformers_victim", str(tmp_path), what],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    nbytes, needed_bytes = map(int, done.stdout.split())
    return nbytes, needed_bytes


def test_parameters_are_ordinary_when_the_run_is_left(tmp_path: Path) -> None:
    saved("t5", tmp_path / "model")
    model, weights = from_pretrained(tmp_path / "model")
    with offload(model, None, tiers(next(iter(LAYOUTS)), tmp_path), weights=weights):
        pass
    assert {type(each) for each in model.parameters()} == {nn.Parameter}
