"""The pure core: what is where, who goes next.  Knows no torch, threads, clock or files."""
