"""Any configuration of DeepSpeed's or Accelerate's: what is written is accepted, or all of it is refused."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.foreign_configs import CASES
from tests.property.test_config_yaml import TOKENS
from tierstore.cli import accelerate_config, convert, deepspeed_config
from tierstore.cli.run_document import to_yaml
from tierstore.config import OffloadConfig, yaml_text
from tierstore.errors import UsageError
from tierstore.training.activations.config.sections import sections_of

_SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(
        ["auto", "cpu", "nvme", "none", "CPU", "/local_nvme", "a\nb: c", "\u2028x", "\ud800", "#", 3]
    )
)
_KEYS = st.sampled_from(
    [
        *("stage", "device", "nvme_path", "pin_memory", "cpu_checkpointing", "block_size", "queue_depth"),
        *("offload_param", "offload_optimizer", "cpu_offload", "cpu_offload_params", "aio"),
        *("zero_stage", "offload_param_device", "offload_param_nvme_path", "offload_optimizer_device"),
        *("fsdp_offload_params", "fsdp_activation_checkpointing", "use_cpu", "mixed_precision"),
        *deepspeed_config.SECTIONS,
        *accelerate_config.SECTIONS,
    ]
) | st.text(max_size=6)
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEYS, inner, max_size=6),
    max_leaves=20,
)
_PLACE = st.fixed_dictionaries(
    {"device": st.sampled_from(["nvme", "cpu", "none", "NVME"])},
    optional={"nvme_path": st.text(max_size=8) | st.just("/d"), "pin_memory": st.booleans()},
)
_LIKELY = st.fixed_dictionaries(
    {
        "zero_optimization": st.fixed_dictionaries(
            {"stage": st.integers(0, 3)},
            optional={"offload_param": _PLACE, "offload_optimizer": _PLACE, "cpu_offload": st.booleans()},
        )
    },
    optional={
        "aio": st.fixed_dictionaries(
            {}, optional={"block_size": st.integers(-1, 2**63), "queue_depth": _SCALARS}
        ),
        "activation_checkpointing": st.fixed_dictionaries({"cpu_checkpointing": st.booleans()}),
        "train_batch_size": _VALUES,
    },
)


def _require_short(refused: UsageError) -> None:
    assert len(str(refused)) < 20_000


def judge(text: str) -> None:
    """See to it that a text is converted to what a run accepts, or refused shortly."""
    try:
        conversion = convert.converted(text, "given")
    except UsageError as refused:
        _require_short(refused)
        return
    written = to_yaml(conversion.document, [convert.WRITTEN_BY, *conversion.remarks])
    read = yaml_text.parse(written, "written")
    assert read == conversion.document
    OffloadConfig.from_document(conversion.document)
    sections_of(conversion.document)
    assert all(remark.isprintable() for remark in conversion.remarks)
    assert written.encode("utf-8")


@given(st.dictionaries(_KEYS, _VALUES, max_size=6) | _LIKELY)
@example(dict(CASES["parameters and state in files"][0]))
def test_whatever_a_mapping_says_what_is_written_is_accepted(document: dict[str, Any]) -> None:
    judge(json.dumps(document))


@given(
    st.lists(st.sampled_from([*TOKENS, *deepspeed_config.SECTIONS, *accelerate_config.SECTIONS]), max_size=30)
)
@settings(deadline=None)
def test_whatever_a_text_says_what_is_written_is_accepted(tokens: list[str]) -> None:
    judge("".join(tokens))
