"""The state of training on disk: files, and a durable store."""
