"""What only a torch accelerator can show."""
