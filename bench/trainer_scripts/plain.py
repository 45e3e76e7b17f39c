"""Train a small Llama with Hugging Face's Trainer."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=256, hidden_size=64, intermediate_size=192, num_hidden_layers=4, num_attention_heads=4
)
model = LlamaForCausalLM(config)
rows = [{"input_ids": tokens, "labels": tokens} for tokens in torch.randint(0, 256, (64, 32))]
arguments = TrainingArguments(
    "output", max_steps=6, per_device_train_batch_size=1, use_cpu=True, report_to="none", disable_tqdm=True
)
trainer = Trainer(model, arguments, train_dataset=rows)
loss = trainer.train().training_loss
print(loss, sum(each.double().sum().item() for each in model.parameters()))
