"""Modules: when their bytes come and go, and their parameters and buffers as bundles."""
