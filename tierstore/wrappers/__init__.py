"""Backends around backends: each changes one thing, and passes everything else on."""

from __future__ import annotations
