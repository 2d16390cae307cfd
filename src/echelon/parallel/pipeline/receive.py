"""Receives that wait for the message, and not the message for them.

Over gloo a sender asks first, and its thread sends once the receiver has said where to: two wake-ups on cores that
compute. Where that was said before, a message leaves at once and arrives during the computation before the one that
needs it. On a GPU nothing is changed: there a receive in a stream holds up what comes after it.
"""

from __future__ import annotations

from typing import Any, Literal

import torch.distributed as dist

from echelon.parallel.pipeline.timeline import RecordedStage

Way = Literal["forward", "backward"]
AHEAD = 2  # computations before the one that needs a message


class EarlyStage(RecordedStage):
    """A stage that receives one micro-batch ahead, for schedules with one stage a rank: each peer sends it one kind.

    Attributes:
        early_of: number of micro-batches; 0: torch's own order.
    """

    early_of = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._under_way: dict[tuple[Way, int], list[Any]] = {}

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Receive this micro-batch and the next; nothing is left to the schedule."""
        return self._ahead("forward", fwd_chunk_id) if self.early_of else super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Receive this micro-batch's gradient and the next."""
        return self._ahead("backward", bwd_chunk_id) if self.early_of else super().get_bwd_recv_ops(bwd_chunk_id)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Wait for the micro-batch and run it."""
        self._arrived("forward", fwd_chunk_id)
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Wait for the gradient and run it back."""
        self._arrived("backward", bwd_chunk_id)
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def _ahead(self, way: Way, microbatch: int) -> list[dist.P2POp]:
        for each in range(microbatch, min(microbatch + 2, self.early_of)):
            if (way, each) not in self._under_way:
                get = super().get_fwd_recv_ops if way == "forward" else super().get_bwd_recv_ops
                self._under_way[way, each] = [op.op(op.tensor, op.peer, op.group, op.tag) for op in get(each)]
        return []

    def _arrived(self, way: Way, microbatch: int) -> None:
        for work in self._under_way.pop((way, microbatch), []):
            work.wait()


def receive_early(schedule: Any) -> None:
    """Move the receives of a schedule with several stages a rank ahead, in place; their order stays.

    Args:
        schedule: one that keeps its actions with sends and receives: all of several stages a rank do.
    """
    for rank, actions in schedule.pipeline_order_with_comms.items():
        schedule.pipeline_order_with_comms[rank] = moved_ahead(actions)


def moved_ahead(actions: list[Any]) -> list[Any]:
    """Return a rank's actions with each receive before the `AHEAD`-th computation before it."""
    found: list[Any] = []
    for action in actions:
        if not action.computation_type.name.startswith("RECV"):
            found.append(action)
            continue
        computations = [i for i, each in enumerate(found) if each.is_compute_op]
        place = computations[-AHEAD] if len(computations) >= AHEAD else 0
        receives = [i for i, each in enumerate(found) if each.computation_type.name.startswith("RECV")]
        found.insert(max(place, receives[-1] + 1 if receives else 0), action)
    return found
