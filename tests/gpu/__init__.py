"""What only a torch accelerator can show: a GPU, or the simulated one (`tests.accelerator`)."""
