"""Tensor parallelism: layers split over ranks as hints, a run's own patterns or the model's structure say."""

from echelon.parallel.tensor.apply import apply_plan, apply_tensor, full_state, load_full_state
from echelon.parallel.tensor.check import answer, same_function
from echelon.parallel.tensor.plan import TensorPlan, plan_tensor

__all__ = [
    "TensorPlan",
    "answer",
    "apply_plan",
    "apply_tensor",
    "full_state",
    "load_full_state",
    "plan_tensor",
    "same_function",
]
