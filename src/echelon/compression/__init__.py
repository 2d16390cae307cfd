"""Codecs: what travels instead of a tensor. Importing this package does not import torch."""
