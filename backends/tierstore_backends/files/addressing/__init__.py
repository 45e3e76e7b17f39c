"""Where bytes live: large files in one directory or several, as one address space."""
