"""What tierstore is one line in, each with the framework as it is installed, and exporters of metrics."""
