"""tierstore beside its peers: the same work, in turns, on the same machine, in the same environment.

Rule 1: each peer runs in a process of its own; the processes take turns, round by round, and every
second round goes backwards.
Rule 2: a peer that is not installed is skipped, one that fails is dropped; both are named, with the reason.
Rule 3: what was moved is compared byte by byte, and losses step by step; a difference fails the run.
Rule 4: what went through the page cache says so: written bytes are synced, reads are named cold or warm.

``make peers`` installs the peers into ``.venv-peers``; ``python -m bench.peers io|training|inference|tables``
measures.  How to read what it prints: ``docs/how-to/compare-with-peers.md``.
"""
