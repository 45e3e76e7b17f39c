"""What happens while a model runs whose activations are swapped or recomputed."""
