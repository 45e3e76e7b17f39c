"""Any configuration of DeepSpeed's or Accelerate's: what is written is accepted, or all of it is refused.

1. What is written means what DeepSpeed does: `meant` says that from its documentation, without code of ours.
2. No key is left out of what is said.
3. A refusal is one line that names the file, and the key where there is one.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from tests.foreign_configs import CASES
from tests.property.test_config_yaml import TOKENS
from tierstore.cli import accelerate_config, convert, deepspeed_config, main
from tierstore.cli.run_document import to_yaml
from tierstore.config import OffloadConfig, yaml_text
from tierstore.errors import ConfigError, UsageError
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


_PLACE_OR_NOT: Final[st.SearchStrategy[Any]] = (
    _PLACE
    | st.just({})
    | st.none()
    | st.just("auto")
    | st.fixed_dictionaries({}, optional={"device": _SCALARS, "nvme_path": _SCALARS, "pin_memory": _SCALARS})
)
_WELL_FORMED = st.fixed_dictionaries(
    {
        "zero_optimization": st.fixed_dictionaries(
            {},
            optional={
                "stage": st.integers(0, 3),
                "offload_param": _PLACE_OR_NOT,
                "offload_optimizer": _PLACE_OR_NOT,
                "sub_group_size": _SCALARS,
            },
        )
    },
    optional={
        "aio": st.fixed_dictionaries(
            {}, optional={"block_size": st.integers(1, 2**40) | st.just(1e6), "queue_depth": st.just("auto")}
        ),
        "activation_checkpointing": st.fixed_dictionaries({"cpu_checkpointing": st.booleans() | st.none()}),
        "bf16": _VALUES,
    },
)


def _require_short(refused: UsageError) -> None:
    assert len(str(refused)) < 20_000


def _place(zero: Mapping[str, Any], section: str, least_stage: int) -> tuple[str | None, str | None]:
    """Return what DeepSpeed offloads a section's states to, and the directory."""
    given = zero.get(section)
    given = given if isinstance(given, Mapping) else {}
    device = str(given.get("device")).lower()
    stage = zero.get("stage", 0)
    if device == "nvme" and stage == 3:  # "NVMe offloading is available only with ZeRO stage 3"
        path = given.get("nvme_path")
        return "disk", None if path == "auto" else path
    return ("cpu" if device == "cpu" and stage >= least_stage else None), None


def meant(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return our words for what DeepSpeed's documentation says that a configuration offloads."""
    zero = document["zero_optimization"]
    param, of_param = _place(zero, "offload_param", 3)
    optimizer, of_optimizer = _place(zero, "offload_optimizer", 1)
    paths = [*dict.fromkeys(os.path.normpath(each) for each in (of_param, of_optimizer) if each is not None)]
    checkpoints = document.get("activation_checkpointing", {}).get("cpu_checkpointing")
    words = {
        "offload_param": param,
        "offload_optimizer": optimizer,
        "optimizer_target": "cpu" if optimizer else None,  # "Optimizer computation is offload to CPU"
        "offload_grad": "cpu" if optimizer else None,
        "offload_path": (paths if len(paths) > 1 else paths[0]) if paths else None,
        "offload_checkpoint": "cpu" if checkpoints else None,
        "memory_offload": None if param or optimizer or checkpoints else "OFF",
        "offload_disk_size": 0
        if (param or optimizer or checkpoints) and "disk" not in (param, optimizer)
        else None,
    }
    return {key: value for key, value in words.items() if value is not None}


def _keys(given: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return the keys of a configuration of DeepSpeed's, with the sections in which offloading is."""
    found: list[str] = []
    for key, value in given.items():
        is_read = f"{prefix}{key}" in _SECTIONS and isinstance(value, Mapping)
        found += _keys(value, f"{prefix}{key}.") if is_read else [f"{prefix}{key}"]
    return found


_SECTIONS: Final = frozenset(
    {
        *("zero_optimization", "aio", "activation_checkpointing"),
        *("zero_optimization.offload_param", "zero_optimization.offload_optimizer"),
    }
)


def judge(text: str) -> None:
    """See to it that a text is converted to what a run accepts, or refused shortly."""
    try:
        conversion = convert.converted(text, "given")
    except UsageError as refused:
        _require_short(refused)
        assert str(refused).startswith("given: ")  # noqa: PT017 - what else is right
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


@given(_WELL_FORMED)
@example({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "/b"}}})
@example({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}})
def test_what_is_written_offloads_what_deepspeed_offloads(document: dict[str, Any]) -> None:
    try:
        found = deepspeed_config.converted(document, "given").document
    except ConfigError as refused:
        places = ("device", "nvme_path", "pin_memory")
        assert any(f".{key}=" in str(refused) for key in places)  # noqa: PT017 - what else is right
        return
    ours = dict(found["offload_config"])
    for key in ("enable_pinned_mem", "aio_block_size", "aio_queue_depth"):
        ours.pop(key, None)
    assert ours == meant(document)


@given(st.dictionaries(_KEYS, _VALUES, max_size=6) | _LIKELY | _WELL_FORMED)
def test_of_every_key_it_is_said_what_becomes_of_it_or_that_it_is_wrong(document: dict[str, Any]) -> None:
    assume(not any(key in document for key in accelerate_config.SECTIONS))
    try:
        said = [each.split(" -> ")[0] for each in deepspeed_config.converted(document, "given").remarks]
    except ConfigError as refused:
        _require_short(refused)
        assert any(f"{key.rpartition('.')[2]}=" in str(refused) for key in _keys(document))  # noqa: PT017
        return
    for key in _keys(document):
        if key.isprintable() and key and not key.endswith("."):
            assert any(each.startswith(f"{key} ") for each in said), key


@given(st.integers(501, 700))
@settings(max_examples=3)
def test_of_more_keys_than_anybody_reads_those_that_offload_are_told_and_the_others_counted(
    many: int,
) -> None:
    unknown = {f"key{number}": number for number in range(many)}
    zero = {"stage": 3, "offload_param": {**unknown, "device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
    remarks = deepspeed_config.converted({"zero_optimization": zero}, "given").remarks
    assert any(remark.startswith("zero_optimization.offload_optimizer.device ") for remark in remarks)
    assert remarks[-1] == f"and {many + 1 - 500} more keys -> nothing"  # one of them is the stage


_CONTENTS: Final = (
    st.binary(max_size=60)
    | st.lists(st.sampled_from([each.encode() for each in TOKENS]), max_size=20).map(b"".join)
    | _WELL_FORMED.map(lambda document: json.dumps(document).encode())
    | st.tuples(_WELL_FORMED.map(json.dumps), st.sampled_from(["utf-8-sig", "utf-16"])).map(
        lambda each: each[0].encode(each[1])
    )
    | st.tuples(
        _WELL_FORMED.map(lambda document: json.dumps(document).encode()),
        st.binary(max_size=3),
        st.floats(0, 1),
    ).map(lambda each: each[0][: math.floor(len(each[0]) * each[2])] + each[1])
)


def _made(folder: Path, kind: str, content: bytes) -> Path:
    """Make what a command line names."""
    path = folder / "ds_config.json"
    match kind:
        case "a file":
            path.write_bytes(content)
        case "a link":
            (folder / "elsewhere").write_bytes(content)
            path.symlink_to("elsewhere")
        case "a circle":
            path.symlink_to("ds_config.json")
        case "a directory":
            path.mkdir()
        case "below a file":
            path.write_bytes(content)
            path /= "ds_config.json"
        case "locked":
            path.write_bytes(content)
            path.chmod(0)
    return path


@pytest.mark.parametrize(
    "kind", ["a file", "a link", "a circle", "a directory", "below a file", "locked", "nothing"]
)
@given(content=_CONTENTS, is_json=st.booleans())
@settings(deadline=None)
def test_a_command_line_gives_yaml_or_one_line(kind: str, content: bytes, is_json: bool) -> None:
    out, err = io.StringIO(), io.StringIO()
    with tempfile.TemporaryDirectory() as folder:
        source = _made(Path(folder), kind, content)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(["convert", str(source), *["--json"] * is_json])
        names = (str(source), repr(str(source)))
    if code == 0:
        text = out.getvalue()
        document = json.loads(text)["document"] if is_json else yaml_text.parse(text, "written")
        assert isinstance(document, dict)
        OffloadConfig.from_document(document)
        assert err.getvalue() == ""
        return
    assert code == 2
    assert out.getvalue() == ""
    (line,) = err.getvalue().splitlines()
    assert any(line.startswith(f"tierstore convert: {name}: ") for name in names)
