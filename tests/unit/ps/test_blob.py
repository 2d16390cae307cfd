"""Frames of tensors, and what they hold on to."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch

from echelon.ps.blob import COPIED_BYTES, sent_frame


@pytest.mark.parametrize("elements, holds", [(1000, False), (COPIED_BYTES // 4, False), (COPIED_BYTES, True)])
def test_a_copy_does_not_hold_the_tensor(elements: int, holds: bool) -> None:
    array = np.arange(elements, dtype=np.float32)
    memory = weakref.ref(array)
    frame = sent_frame(torch.from_numpy(array))
    del array
    assert (memory() is not None) == holds, "workers keep what they have pushed, and each push held its gradients"
    assert np.array_equal(np.frombuffer(frame, np.float32), np.arange(elements, dtype=np.float32))
