"""Threads against each other, held apart by gates and barriers."""
