"""How much memory there is, what takes it, and what is fetched ahead."""
