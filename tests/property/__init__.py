"""Rules that hold for whatever Hypothesis thinks of."""
