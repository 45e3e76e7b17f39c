"""Models that ``torch.distributed.fsdp.fully_shard`` has sharded: each process's part is in its tiers."""
