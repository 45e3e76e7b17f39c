"""tierstore in the frameworks that people use: one module each, and one extra of the package.

Each module names what it needs from its framework, imports it when it is imported itself, and does through
`tierstore.training.offload` and the public store what a user could write by hand.  None imports another.
"""
