"""TRL's trainers on offloaded models: the same bits, the reference in the same tiers as the policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integrations import tiny

trl: Any = pytest.importorskip("trl")
pytest.importorskip("datasets")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<eos>": 1} | {f"w{number}": number + 2 for number in range(tiny.VOCABULARY - 2)}
    made = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    kind: Any = PreTrainedTokenizerFast
    return kind(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


def _told(kind: Any, path: Path) -> Any:
    return kind(
        output_dir=str(path / "output"),
        max_steps=2,
        per_device_train_batch_size=2,
        max_length=12,
        learning_rate=1e-2,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
    )


def _seen(reference: Any, *, is_offloaded: bool) -> Any:
    """Return a callback that sees in the midst of a training whether the reference is offloaded."""
    from torch import nn
    from transformers import TrainerCallback

    class Seeing(TrainerCallback):
        """Sees it."""

        def on_step_end(self, *_: Any, **__: Any) -> None:
            """Look at its parameters."""
            parameters = () if reference is None else reference.parameters()
            assert all((type(each) is nn.Parameter) is not is_offloaded for each in parameters)

    return Seeing()


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_a_trainer_of_trl_gives_the_same_bits(kind: str, tmp_path: Path) -> None:
    from datasets import Dataset  # type: ignore[import-untyped,unused-ignore]

    from tierstore.integrations.transformers import offloading

    def trained(config: Any, path: Path) -> tiny.Trained:
        trainer_of = {"sft": trl.SFTTrainer, "dpo": trl.DPOTrainer}[kind]
        told = _told({"sft": trl.SFTConfig, "dpo": trl.DPOConfig}[kind], path)
        texts = [" ".join(f"w{(n * 7 + k) % 40}" for k in range(5)) for n in range(8)]
        data: dict[str, list[str]] = {"text": texts}
        more: dict[str, Any] = {}
        if kind == "dpo":
            data = {"prompt": texts, "chosen": [" w3 w4"] * 8, "rejected": [" w9"] * 8}
            more["ref_model"] = tiny.model_of("llama")
        made = trainer_of if config is None else offloading(trainer_of, config)
        trainer = made(
            model=tiny.model_of("llama"),
            args=told,
            train_dataset=Dataset.from_dict(data),
            processing_class=_tokenizer(),
            **more,
        )
        trainer.add_callback(_seen(more.get("ref_model"), is_offloaded=config is not None))
        trainer.train()
        return tiny.outcome_of(trainer, path)

    plain = trained(None, tmp_path / "plain")
    config = tiny.config_of("three", tmp_path, max_device_memory="3MB", offload_cpu_size="192KB")
    ours = trained(config, tmp_path / "ours")
    assert tiny.differences(plain, ours) == []
