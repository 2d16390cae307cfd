"""What all tests share: they compute on one thread, and no drawn example is judged by how long it took."""

import torch
from hypothesis import HealthCheck, settings

# Tensors of tests are small: several threads wait for each other longer than they compute, on a busy machine a hundred
# times as long. Ranks compute on one thread, too (`tests/ranks/spawn.py`).
torch.set_num_threads(1)

# The machine may have other work.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")
