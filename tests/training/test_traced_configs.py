"""Models from a ``config.json``: their sizes, peaks and steps, and what is said of files that are none."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from tests import target
from tierstore.errors import UsageError
from tierstore.planning import Program
from tierstore.testing.memory import DeviceBudget
from tierstore.training.tracing import RESIDENT_PEAK, build_from_config, optimizer_named, trace_model

transformers = pytest.importorskip("transformers")

LLAMA: Mapping[str, object] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 200,
}
GPT2: Mapping[str, object] = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "vocab_size": 200,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MIXTRAL: Mapping[str, object] = {
    **LLAMA,
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
} | {"num_local_experts": 4}
T5: Mapping[str, object] = {
    "model_type": "t5",
    "architectures": ["T5ForConditionalGeneration"],
    "d_model": 64,
    "d_ff": 128,
    "d_kv": 16,
    "num_layers": 2,
    "num_heads": 4,
    "vocab_size": 200,
    "decoder_start_token_id": 0,
}
BERT: Mapping[str, object] = {
    "model_type": "bert",
    "architectures": ["BertForSequenceClassification"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 200,
}
VIT: Mapping[str, object] = {
    "model_type": "vit",
    "architectures": ["ViTForImageClassification"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "image_size": 64,
    "patch_size": 16,
}


def written(path: Path, fields: object) -> Path:
    file = path / "config.json"
    file.write_text(fields if isinstance(fields, str) else json.dumps(fields), encoding="utf-8")
    return file


def program_of(path: Path, fields: object, dtype: str | None = None) -> Program:
    build = build_from_config(written(path, fields), batch=2, sequence=32, dtype=dtype)
    return trace_model(build, optimizer=optimizer_named("momentum"))


def measured_peak_bytes(program_fields: Mapping[str, object]) -> int:
    given = {name: value for name, value in program_fields.items() if name != "model_type"}
    config = transformers.AutoConfig.for_model(str(program_fields["model_type"]), **given)
    config.use_cache = False
    with DeviceBudget("1TB") as meter:
        model = getattr(transformers, config.architectures[0])(config)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
        tokens = torch.zeros(2, 32, dtype=torch.int64)
        for _ in range(2):
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return meter.peak_bytes


@pytest.mark.skipif(target.accelerator is not None, reason="the meter is of host memory")
@pytest.mark.parametrize("fields", [LLAMA, GPT2, MIXTRAL, T5], ids=lambda fields: str(fields["model_type"]))
def test_the_peak_of_a_model_of_transformers_is_predicted(
    tmp_path: Path, fields: Mapping[str, object]
) -> None:
    peak_bytes = int(program_of(tmp_path, fields).facts[RESIDENT_PEAK])
    assert peak_bytes == pytest.approx(measured_peak_bytes(fields), rel=0.005)


def test_numbers_of_a_file_make_the_model(tmp_path: Path) -> None:
    program = program_of(tmp_path, LLAMA)
    assert program.name == "LlamaForCausalLM"
    attention = 64 * 64 * 2 + 2 * 64 * 32
    each = attention + 3 * 64 * 160 + 2 * 64
    assert program.facts["parameters"] == str(2 * 200 * 64 + 2 * each + 64)
    assert program.facts["layers"] == "2"


@pytest.mark.parametrize("fields", [BERT, VIT], ids=lambda fields: str(fields["model_type"]))
def test_labels_have_the_form_that_an_architecture_takes(
    tmp_path: Path, fields: Mapping[str, object]
) -> None:
    assert program_of(tmp_path, fields).assumptions == ()


def test_a_type_is_the_file_s_or_the_one_asked_for(tmp_path: Path) -> None:
    def bytes_of(fields: object, dtype: str | None = None) -> int:
        program = program_of(tmp_path, fields, dtype)
        return program.data["param/model.embed_tokens.weight"].nbytes

    elements = 200 * 64
    halves = [{**LLAMA, name: "bfloat16"} for name in ("torch_dtype", "dtype")]
    assert bytes_of(LLAMA) == bytes_of(halves[0], "fp32") == 4 * elements
    assert [bytes_of(each) for each in halves] == [2 * elements] * 2
    assert torch.get_default_dtype() is torch.float32


def test_without_an_architecture_the_usual_one_of_its_kind_is_made(tmp_path: Path) -> None:
    assert program_of(tmp_path, {**LLAMA, "architectures": None}).name == "LlamaForCausalLM"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({**LLAMA, "architectures": ["LamaForCausalLM"]}, "'LamaForCausalLM'. Near it: LlamaForCausalLM"),
        ({**LLAMA, "architectures": ["AutoTokenizer"]}, "knows no architecture 'AutoTokenizer'"),
        ({**LLAMA, "architectures": ["os.system"]}, "knows no architecture 'os.system'"),
        ({**LLAMA, "model_type": "lama"}, "knows no model_type 'lama'. Near it: "),
        ({**LLAMA, "num_hidden_layers": 10**9}, "'num_hidden_layers' is 1000000000; accepted: at most 10000"),
        ({**LLAMA, "hidden_size": -64}, "'hidden_size' is -64"),
        ({**LLAMA, "vocab_size": 2**60}, "'vocab_size' is"),
        ({**LLAMA, "num_attention_heads": 7}, "is no configuration of llama"),
        ({**LLAMA, "hidden_size": "wide"}, "is no configuration of llama"),
        ({**LLAMA, "torch_dtype": "int3"}, "dtype='int3': accepted: float32"),
        ({"architectures": ["LlamaForCausalLM"]}, "it has no model_type"),
        ([1, 2], "it has no model_type"),
        ('{"model_type": ', "is no config.json"),
        ('{"model_type": "llama", "model_type": "gpt2"}', "given twice"),
        ("[" * 100_000, "nests too deep"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused_by_name(
    tmp_path: Path, fields: object, said: str
) -> None:
    with pytest.raises(UsageError) as caught:
        build_from_config(written(tmp_path, fields))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_code_of_a_file_s_own_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "modeling_own.py").write_text("raise SystemExit('it was run')", encoding="utf-8")
    own = {"AutoConfig": "modeling_own.Config", "AutoModelForCausalLM": "modeling_own.Model"}
    assert program_of(tmp_path, {**LLAMA, "auto_map": own}).name == "LlamaForCausalLM"


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        build_from_config(tmp_path / "config.json")


def test_without_transformers_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UsageError, match=r"pip install 'tierstore\[examples\]'"):
        build_from_config(written(tmp_path, LLAMA))


def test_transformers_is_not_imported_before_it_is_needed() -> None:
    source = importlib.import_module("tierstore.training.tracing.configs")
    assert "transformers" not in vars(source)


@pytest.mark.parametrize("name", ["adamw", "AdamW", "momentum", "adafactor", "rmsprop"])
def test_optimizers_are_made_by_name(name: str) -> None:
    make = optimizer_named(name)
    assert make is not None
    assert isinstance(make([torch.zeros(2, 2, requires_grad=True)]), torch.optim.Optimizer)


def test_an_optimizer_that_nobody_knows_is_refused() -> None:
    assert optimizer_named("none") is None
    with pytest.raises(UsageError, match="optimizer='lion': accepted: adamw"):
        optimizer_named("lion")
