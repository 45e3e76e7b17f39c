"""Formats of files of others, read and written piece by piece: safetensors, one file or several, and JSON."""
