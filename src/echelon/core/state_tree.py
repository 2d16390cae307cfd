"""What a checkpoint holds of a part of a run: a tree of plain containers, tensors and scalars."""

from collections.abc import Mapping
from typing import Any

StateTree = dict[str, Any]
"""Nested dicts (keys are strings or integers), lists and tuples of tensors, int, float, bool, str and None.

Nothing else: `checkpoint.tree` refuses it. Subclasses come back as these (an OrderedDict as a dict, a NumPy float64
as a float), tensors as plain CPU tensors. `state_dict()` of any part of a run returns one; which keys it has is known
to that part only, for files of earlier versions are read too.
"""

StateView = Mapping[str, Any]
"""A `StateTree` that the reader leaves as it is: what `load_state_dict()` takes."""
