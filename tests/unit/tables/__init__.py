"""Tests of the rows of tables."""
