"""What a user writes about activations, read and matched with the model's layers."""
