"""Private names of torch that are used before torch is imported.

All others are in `torch_compat`, which imports torch: a command that starts a run must not wait for that only to say
what its processes are to be forked from.
"""

from __future__ import annotations

IMPORTED_BY_OPTIMIZERS = "torch._dynamo"
"""The module that torch's optimizers import at their first step, for more than a second."""
