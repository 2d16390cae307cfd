"""Kinds of data by name: each file of this folder that says `SOURCE = ...` is one."""
