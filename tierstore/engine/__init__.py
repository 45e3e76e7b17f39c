"""The thin engine: carries out what the core decides, and tells it what happened."""
