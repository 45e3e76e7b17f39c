"""Training with offload against the same loop in plain PyTorch."""
