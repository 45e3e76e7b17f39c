"""What autograd holds: gradients, and tensors that are saved for backward."""
