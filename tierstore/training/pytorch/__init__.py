"""What the library needs of PyTorch beneath its public names: modes, hooks, observers."""
