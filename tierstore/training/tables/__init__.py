"""Tables in a run: their rows lie in the store's host tier, and on disk when that is full.

`tierstore.tables` knows how rows lie; here it is said where, how much of the host tier is theirs, and what a
checkpoint keeps of them.
"""
