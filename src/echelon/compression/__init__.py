"""Codecs: what travels instead of a tensor. Importing this package does not import torch."""

from __future__ import annotations

from echelon.compression.registry import build, decay_factor, leaves_momentum, names, place_momentum

__all__ = ["build", "decay_factor", "leaves_momentum", "names", "place_momentum"]
