"""tierstore in frameworks that people train with, and exporters of metrics: the real ones, no network."""
