"""Demand faults: a use of a tensor whose bytes are away brings them first."""
