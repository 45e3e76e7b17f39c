"""``placement`` of modules: what is read, chosen, logged and refused."""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.training.host_models import CASES, WIDTH, Dense, assert_same_placed, has_device, trial_of
from tests.training.twins import LAYOUTS, Trial, config_of
from tierstore.config import OffloadConfig
from tierstore.errors import CapacityError, ConfigError, UsageError
from tierstore.planning import Placement
from tierstore.testing.memory import DeviceBudget
from tierstore.training import offload, place


class Net(nn.Module):
    """The document's net, and a tied output."""

    def __init__(self) -> None:
        super().__init__()
        self.flatten = nn.Flatten()
        self.layer1 = Dense()
        self.relu1 = nn.ReLU()
        self.layer2 = Dense()
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Transform."""
        made: Tensor = self.head(self.layer2(self.relu1(self.layer1(self.flatten(x)))))
        return made


def opened(
    model: nn.Module,
    path: Path,
    placement: Mapping[str, str] | None = None,
    document: Mapping[str, object] | None = None,
    **more: object,
) -> Placement:
    """Offload a model for a moment; return where everything lives."""
    if document is not None:
        more["placement"] = document
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=0.1) if parameters else None
    with offload(model, optimizer, config_of("device", path, more), placement=placement) as run:
        return run.placement


def on_host(placement: Placement) -> set[str]:
    return {key for key, homes in placement.bundles.items() if homes.parameters.device == "cpu"}


def test_the_first_pattern_that_matches_counts_for_all_below_it(tmp_path: Path) -> None:
    found = opened(Net(), tmp_path, {r"layer1\.add": "device", r"layer\d": "cpu", "layer2": "device"})
    assert on_host(found) == {"param/layer1.weight", "param/layer2.weight"}


def test_what_all_children_of_a_module_are_on_the_host_for_is_there_too(tmp_path: Path) -> None:
    found = opened(Net(), tmp_path, {r"layer1\.(matmul|add)": "cpu", r"layer2\.matmul": "cpu"})
    assert on_host(found) == {"param/layer1.weight"}


def test_patterns_are_read_from_a_document_in_short_and_in_full(tmp_path: Path) -> None:
    short = OffloadConfig.from_document({"placement": {"layer1": "cpu"}, "offload_config": {}})
    assert short.placement == {"layer1": "cpu"}
    full = {"modules": {"layer1": "cpu"}, "stashing": "always"}
    for placement in (short.placement, full):
        found = opened(Net(), tmp_path, document=placement)
        assert on_host(found) == {"param/layer1.weight"}
        assert dict(found.modules) == {"layer1": "cpu"}


def test_python_s_patterns_come_before_the_file_s(tmp_path: Path) -> None:
    found = opened(Net(), tmp_path, {"layer1": "device"}, {"layer.": "cpu"})
    assert on_host(found) == {"param/layer2.weight"}
    assert list(found.modules) == ["layer1", "layer."]


def test_what_a_run_says_can_be_given_back(tmp_path: Path) -> None:
    found = opened(Net(), tmp_path, {"layer1": "cpu"})
    assert Placement.from_yaml(found.to_yaml()) == found
    mapping = {**found.to_mapping(), "residents": []}
    again = opened(Net(), tmp_path, document=mapping)
    assert again.bundles == found.bundles
    assert again.modules == found.modules


def test_without_a_device_nothing_is_placed_and_all_of_it_is_printed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = Net()
    with (
        caplog.at_level(logging.INFO, "tierstore"),
        offload(model, None, config_of("host", tmp_path), placement={"layer1": "cpu", "x": "cpu"}) as run,
    ):
        assert "modules 'layer1': on the cpu" in str(run.placement)
        model(torch.randn(2, WIDTH))
        assert not [key for key in run.store if key.startswith("cross/")]
    assert "placement: 'x' matches no module" in caplog.messages
    assert not [each for each in caplog.messages if each.startswith("primitive target")]


# ---------------------------------------------------------------------- what is logged


def test_each_placed_module_is_logged_as_the_original_does(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "tierstore"):
        opened(Net(), tmp_path, {r"layer1\.(matmul|add)": "cpu", "head": "cpu", "layer2": "device"})
    assert [each for each in caplog.messages if each.startswith("primitive")] == [
        f"primitive target does not match backend: GPU, primitive_target: CPU, node name: Default/{node}"
        for node in ("layer1/MatMul-op3", "layer1/Add-op4", "Linear-op9")
    ]


def test_overlaps_and_patterns_without_a_match_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "tierstore"):
        opened(Net(), tmp_path, {r"layer\d\.add": "cpu", r".*\.add": "device", "layerr1": "cpu"})
    assert (
        r"placement: 'layer1.add' matches 'layer\d\.add' (cpu) and '.*\.add' (device); the first one wins"
        in caplog.messages
    )
    warnings = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert "placement: 'layerr1' matches no module; did you mean 'layer1'?" in warnings


# ---------------------------------------------------------------------- what is refused


def tied() -> nn.Module:
    model = Net()
    model.head.weight = model.layer1.weight
    return model


def in_one_memory() -> nn.Module:
    model = Net()
    both = torch.randn(2, WIDTH, WIDTH)
    model.layer1.weight = nn.Parameter(both[0])
    model.layer2.weight = nn.Parameter(both[1])
    return model


def with_two_names() -> nn.Module:
    model = Net()
    model.layer2 = model.layer1
    return model


def scripted() -> nn.Module:
    model = Net()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        model.add_module("relu1", torch.jit.script(nn.ReLU()))
    return model


REFUSED: dict[str, tuple[object, Mapping[str, object], type[Exception], str]] = {
    "a word": (Net, {"layer1": "gpu"}, ConfigError, "modules[layer1]='gpu': accepted: 'device', 'cpu'"),
    "operators": (Net, {r"aten\.mm": "cpu"}, UsageError, "names operators"),
    "no expression": (Net, {"layer[": "cpu"}, ConfigError, "is no regular expression"),
    "tied": (
        tied,
        {"layer1": "cpu"},
        UsageError,
        "is also 'head.weight': one computes on 'cpu' ('layer1') and one on 'device' ('head')",
    ),
    "in one memory": (in_one_memory, {"layer1": "cpu"}, UsageError, "are in one memory"),
    "with two names": (
        with_two_names,
        {"layer1": "cpu"},
        UsageError,
        "'layer1' is also 'layer2': it would compute on 'cpu' and on 'device'",
    ),
    "a script": (scripted, {"relu1": "cpu"}, UsageError, "'relu1' is a script of torch.jit"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_by_name(name: str, tmp_path: Path) -> None:
    build, placement, error, text = REFUSED[name]
    model: nn.Module = build()  # type: ignore[operator]
    before = {name: p.clone() for name, p in model.named_parameters()}
    with pytest.raises(error) as raised:
        opened(model, tmp_path, placement)  # type: ignore[arg-type]
    assert text in str(raised.value)
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())


def test_what_is_pinned_is_not_on_the_host(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"param/layer1.weight: is_pinned=True: .* take it out of pinned"):
        opened(Net(), tmp_path, {"layer1": "cpu"}, pinned=["layer1"])


@pytest.mark.parametrize(
    ("homes", "text"),
    [
        ({"state": {"device": "device"}}, "state.device='device': its modules are on the host"),
        ({"state": {"tier": "device"}}, "state.tier='device': its modules compute on the host"),
        ({"parameters": {"tier": "device"}}, "parameters.tier='device'"),
        ({"parameters": {"tier": None}}, "parameters.tier=None"),
    ],
)
def test_homes_that_contradict_a_module_s_side_are_refused(
    homes: Mapping[str, object], text: str, tmp_path: Path
) -> None:
    placement = {"modules": {"layer1": "cpu"}, "bundles": [{"keys": ["param/layer1.weight"], **homes}]}
    with pytest.raises(ConfigError) as raised:
        opened(Net(), tmp_path, document=placement)
    assert text in str(raised.value)


def test_what_is_used_on_the_host_has_to_fit_there(tmp_path: Path) -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide = nn.Linear(256, 256)

        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = self.wide(x)
            return made

    with pytest.raises(
        CapacityError, match=r"'wide.weight' cannot be trained in host memory.*offload_cpu_size"
    ):
        opened(Wide(), tmp_path, {"wide": "cpu"}, offload_cpu_size="512KB", offload_disk_size="64MB")
    found = opened(Wide(), tmp_path, {"wide": "cpu"}, offload_cpu_size="1MB", max_device_memory="8KB")
    assert on_host(found) == {"param/wide.weight"}


# ---------------------------------------------------------------------- what travels


def _steps(trial: Trial) -> None:
    for _ in range(3):
        loss = trial.model(torch.randn(4, WIDTH)).square().mean()
        loss.backward()
        trial.log(loss)
        for optimizer in trial.optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("case", [name for name in CASES if name != "twice"])  # which is learned
def test_nothing_else_travels_than_what_crosses(case: str, tmp_path: Path) -> None:
    """What the device computes with is ignored, and so the program's: every byte that moves has crossed."""
    placed = CASES[case]
    trial = trial_of(placed)
    own = {p for name in placed.on_host for p in trial.model.get_submodule(name).parameters()}
    names = [name.replace(".", r"\.") for name, p in trial.model.named_parameters() if p not in own]
    counted: list[Mapping[tuple[str, str], int]] = []

    def loop(trial: Trial) -> None:
        _steps(trial)
        if trial.run is not None:
            traffic = trial.run.stats().store
            assert traffic is not None
            counted.append({way: moved.nbytes for way, moved in traffic.traffic.items()})

    more = {"ignored": names, "max_device_memory": "4MB"}
    moved, _ = assert_same_placed(placed, loop, "device", tmp_path, more)
    assert counted[0].get(("device", "host"), 0) == moved.bytes_to["cpu"]
    assert counted[0].get(("host", "device"), 0) == moved.bytes_to["device"]


# ---------------------------------------------------------------------- where optimizers step


def _groups(targets: Mapping[str, object], model: nn.Module) -> list[torch.optim.Optimizer]:
    names = {name: [p for n, p in model.named_parameters() if n.startswith(name)] for name in targets}
    known = {p for group in names.values() for p in group}
    rest = [p for p in model.parameters() if p not in known]
    groups: list[dict[str, Any]] = [{"params": names[n], "target": target} for n, target in targets.items()]
    return [torch.optim.Adam([*groups, {"params": rest}], lr=1e-2)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_group_s_target_says_where_it_is_stepped(layout: str, tmp_path: Path) -> None:
    case = CASES["leaf"]

    def loop(trial: Trial) -> None:
        _steps(trial)
        if trial.run is not None and has_device(layout):
            states = {key: homes.state.device for key, homes in trial.run.placement.bundles.items()}
            assert states == {
                "param/0.weight": "cpu",  # as its group says
                "param/1.weight": "cpu",  # as its module computes there
                "param/3.weight": "device",
            }

    more = {} if has_device(layout) else {"device": "cpu"}
    optimize = functools.partial(_groups, {"0": "CPU", "3": "Ascend"})
    assert_same_placed(case, loop, layout, tmp_path, more, optimize)


@pytest.mark.parametrize(
    ("targets", "text"),
    [
        ({"0": "gpu0"}, "a group of Adam has target='gpu0': accepted: 'cpu', 'device'"),
        ({"0": 3}, "has target=3"),
        ({"1": "GPU"}, "the group of '1.weight' has target='GPU', and its module computes on the host"),
    ],
)
def test_wrong_targets_are_refused_by_name(targets: dict[str, object], text: str, tmp_path: Path) -> None:
    case = CASES["leaf"]
    trial = trial_of(case, functools.partial(_groups, targets))
    config = config_of("device", tmp_path)
    with pytest.raises(UsageError) as raised:
        offload(trial.model, list(trial.optimizers), config, placement=case.patterns)
    assert text in str(raised.value)


def test_steps_in_backward_and_on_the_host_are_refused_for_a_module_of_the_device(tmp_path: Path) -> None:
    trial = trial_of(CASES["leaf"], functools.partial(_groups, {"0": "cpu"}))
    config = config_of("device", tmp_path, {"optimizer_in_backward": True})
    with pytest.raises(ConfigError, match=r"param/0.weight: state.device='cpu': optimizer_in_backward"):
        offload(trial.model, list(trial.optimizers), config)


@pytest.mark.parametrize("given", [["head"], "head", 5, {1: "cpu"}], ids=repr)
def test_a_placement_that_is_no_mapping_of_texts_is_refused(given: Any, tmp_path: Path) -> None:  # noqa: ANN401
    with pytest.raises(UsageError, match=r"placement=.*accepted is a mapping of patterns"):
        offload(Net(), None, config_of("host", tmp_path), placement=given)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            "{0: cpu}",
            "accepted: texts, as patterns of module names and the parts of a placement are; not 0. In YAML a",
        ),
        ("{1: cpu, 2: device, head: cpu}", "not 1, 2. In YAML a number wants quotes: '1': cpu"),
        ("[head]", "accepted: patterns of module names, each with cpu or device; or a whole placement"),
    ],
)
def test_a_placement_in_a_document_that_is_no_mapping_of_texts_is_refused(
    given: str, text: str, tmp_path: Path
) -> None:
    document = tmp_path / "run.yaml"
    document.write_text(f"offload_config:\n  device: cpu\n  placement: {given}\n")
    with pytest.raises(ConfigError) as raised:
        offload(Net(), None, document)
    assert text in str(raised.value)


def test_a_model_that_is_offloaded_is_placed_by_its_run_alone(tmp_path: Path) -> None:
    model = Net()
    with (
        offload(model, None, config_of("device", tmp_path)),
        pytest.raises(UsageError, match=r"place\(Net, \.\.\.\): .*layer1.weight.* is offloaded.*placement="),
        place(model, {"head": "cpu"}),
    ):
        pass
    with place(model, {"head": "cpu"}), offload(model, None, config_of("device", tmp_path / "2")) as run:
        assert on_host(run.placement) == {"param/head.weight"}


class _Attending(nn.Module):
    """An attention between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.inner = nn.MultiheadAttention(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Transform."""
        x = self.first(x)
        return self.last(self.inner(x, x, x)[0])  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("patterns", "device"),
    [
        ({"inner": "cpu", r"inner\.out_proj": "device"}, "cpu"),
        ({"inner": "device", r"inner\.out_proj": "cpu"}, "device"),
    ],
)
def test_a_child_that_its_module_never_calls_is_not_placed_by_itself(
    patterns: dict[str, str], device: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError) as raised:
        offload(_Attending(), None, config_of("device", tmp_path), placement=patterns)
    assert "'inner.out_proj' is a NonDynamicallyQuantizableLinear, and what it has is used" in str(
        raised.value
    )
    assert f"which computes on '{device}': place that one" in str(raised.value)
    model = _Attending()
    with (
        offload(model, None, config_of("device", tmp_path), placement={r"inner\.out_proj": "cpu"}),
        DeviceBudget("1GiB", mixing="raise"),
    ):  # the attention has no other child: it goes along
        model(torch.ones(3, 2, 8)).sum().backward()
