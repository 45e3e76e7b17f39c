"""Every backend against the shipped conformance suite."""
