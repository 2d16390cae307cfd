"""Codecs: what travels instead of a tensor. Importing this package does not import torch."""

from __future__ import annotations

from echelon.compression.registry import Compression, read

__all__ = ["Compression", "read"]
