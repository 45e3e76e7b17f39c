"""What a directory keeps: the manifest, how records are written in it, and what can be believed of it."""
