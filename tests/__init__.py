"""The tests of tierstore, one package a kind: a test's name is the rule that it checks."""
