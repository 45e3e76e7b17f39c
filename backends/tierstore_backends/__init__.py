"""The backends that come with tierstore, one folder each, found through entry points.

A backend holds and moves the bytes of one medium and knows `tierstore.spi`, `errors`, `units` and
`alone`, nothing else of ours and no other backend.  What several of them share lies beside the folders:
`options` (what a user may set), `paths` (what is the matter with one), `quota` (bytes held against a
capacity) and `host` (slots and copies in host memory).
"""
