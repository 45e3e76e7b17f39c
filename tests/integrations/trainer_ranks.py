"""Trainers in several processes, as torchrun starts them, forked from one that has imported everything.

``python -m tests.integrations.trainer_ranks FOLDER`` trains every case of ``CASES`` with the plain Trainer
and offloaded in the processes of one group, and writes what each found to ``FOLDER/found.json``.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed

from tests.imported_ahead import import_ahead
from tests.integrations import tiny
from tests.training.rank_lives import as_torchrun, lead

PROCESSES = 2

CASES: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    "accumulated": (
        "tied",
        "disk",
        {"gradient_accumulation_steps": 3, "max_steps": 2, "max_grad_norm": 0.05},
    ),
    "saved": (
        "gpt2",
        "three",
        {
            "eval_strategy": "steps",
            "eval_steps": 1,
            "save_strategy": "steps",
            "save_steps": 1,
            "load_best_model_at_end": True,
            "metric_for_best_model": "eval_loss",
            "max_steps": 2,
        },
    ),
    "resumed": (
        "llama",
        "device",
        {
            "bf16": True,
            "activation_checkpointing": True,
            "activation_checkpointing_kwargs": {"use_reentrant": False},
            "save_strategy": "steps",
            "save_steps": 2,
        },
    ),
}
"""By name: the model, the layout of its tiers and what the Trainer is told."""


def found_in(case: str, folder: Path) -> Mapping[str, object]:
    """Train a case both ways in this process of the group; return what it found, to be compared by others."""
    model, layout, told = CASES[case]
    plain, _ = _trained(model, None, folder / "plain", case, told)
    ours, kinds = _trained(model, _config_of(layout, folder), folder / "ours", case, told)
    return {
        "differs": tiny.differences(plain, ours),
        "logged": ours.logged,
        "digest": _digest(ours.tensors),
        "kinds": kinds,
    }


def refused_in(folder: Path) -> Mapping[str, str]:
    """Return what is said where a Trainer in several processes cannot be right, or cannot fit."""
    config = tiny.config_of("three", folder)
    small = {**config, "max_device_memory": "96KB"}
    return {
        "callback": _refused(tiny.makers(config, "callback"), folder),
        "small": _refused(tiny.makers(small, "class"), folder),
        "fsdp": _refused(tiny.makers(config, "class"), folder, fsdp=True),
    }


def _config_of(layout: str, folder: Path) -> dict[str, object]:
    """Return a layout whose device has room for all gradients, as `DistributedDataParallel` needs it."""
    config = tiny.config_of(layout, folder)
    return {**config, "max_device_memory": "384KB"} if "max_device_memory" in config else config


def _trained(
    model: str, config: Mapping[str, object] | None, path: Path, case: str, told: Mapping[str, Any]
) -> tuple[tiny.Trained, list[str]]:
    looks = _looking()
    for goes_on in (False, True) if case == "resumed" else (False,):
        trainer = tiny.makers(config, "class")(
            model=tiny.model_of(model),
            args=tiny.arguments(path, **told),
            train_dataset=tiny.rows(40, 1),
            eval_dataset=tiny.rows(6, 2),
            callbacks=[looks, *([_stopping(2)] if case == "resumed" and not goes_on else [])],
        )
        trainer.train(resume_from_checkpoint=goes_on)
        distributed.barrier()  # the files of one are all there
    evaluated = trainer.evaluate()
    found = tiny.outcome_of(trainer, path)
    logged = [*found.logged, {"evaluated": evaluated["eval_loss"]}]
    return tiny.Trained(logged, found.tensors, found.files), looks.kinds


def _looking() -> Any:
    """Return a callback that notes what parameters are while steps are made."""
    from transformers import TrainerCallback

    class Looking(TrainerCallback):
        """Notes it."""

        kinds: list[str]

        def __init__(self) -> None:
            self.kinds = []

        def on_step_end(self, *_: Any, **kwargs: Any) -> None:
            """Note it."""
            self.kinds = sorted({type(each).__name__ for each in kwargs["model"].parameters()})

    return Looking()


def _stopping(step: int) -> Any:
    from transformers import TrainerCallback

    class Stopping(TrainerCallback):
        """Ends a training."""

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            """End it after a step."""
            control.should_training_stop = state.global_step == step

    return Stopping()


def _refused(make: tiny.Make, folder: Path, **told: Any) -> str:
    """Return what a Trainer says, with the notes."""
    from tierstore.errors import TierStoreError

    arguments = tiny.arguments(folder, **told)
    try:
        make(model=tiny.model_of("llama"), args=arguments, train_dataset=tiny.rows(8, 1)).train()
    except TierStoreError as error:
        return "\n".join([str(error), *getattr(error, "__notes__", ())])
    return "nothing"


def _digest(tensors: Mapping[str, Tensor]) -> str:
    """Return a digest of tensors' names and bits."""
    found = hashlib.sha256()
    for name, each in sorted(tensors.items()):
        found.update(name.encode())
        found.update(each.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def main(folder: Path) -> None:
    """Lead every case, in one group of processes."""
    import accelerate  # type: ignore[import-untyped]  # noqa: F401 - once, not in every process
    import transformers

    import tierstore.integrations.transformers  # noqa: F401

    transformers.Trainer  # noqa: B018 - which is imported when it is asked for
    transformers.LlamaForCausalLM  # noqa: B018
    transformers.GPT2LMHeadModel  # noqa: B018
    store = distributed.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", 0, PROCESSES, is_master=True, wait_for_workers=False
    )
    import_ahead()

    def work(rank: int) -> object:
        # As torchrun's agent has it: its own store is where the processes meet.
        os.environ.update(as_torchrun(rank, PROCESSES))
        os.environ.update(
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(store.port),
            TORCHELASTIC_USE_AGENT_STORE="True",
            GLOO_SOCKET_IFNAME="lo",
        )
        found = {case: found_in(case, folder / case) for case in CASES}
        found["refused"] = refused_in(folder / "refused")
        distributed.barrier()
        distributed.destroy_process_group()
        return found

    (folder / "found.json").write_text(json.dumps(lead(work, PROCESSES, folder / "found")))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
