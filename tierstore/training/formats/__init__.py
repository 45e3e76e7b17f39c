"""Files and documents of training: JSON, safetensors, weights in several files."""
