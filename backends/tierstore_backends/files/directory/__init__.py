"""Whose a directory is, and what it may consist of: locks, names, notes of commits."""
