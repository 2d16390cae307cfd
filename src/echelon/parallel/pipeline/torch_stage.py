"""torch's stage as it is run here: its computations are recorded, and receives wait for the message, not it for them.

Over gloo a sender asks first, and its thread sends once the receiver has said where to: two wake-ups on cores that
compute. Where that was said before, a message leaves at once and arrives during the computation before the one that
needs it. On a GPU nothing is changed: there a receive in a stream holds up what comes after it.
"""

from __future__ import annotations

from typing import Any, Literal

import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

from echelon.parallel.pipeline.timeline import ActionRecorder

Way = Literal["forward", "backward"]
AHEAD = 2  # computations before the one that needs a message


class RecordedStage(PipelineStage):
    """torch's stage, with each of its computations inside the recorder's marks.

    Attributes:
        inputs_move: whether inputs have a gradient. Where they have none, for all before is frozen, torch would find no
            way from outputs to parameters by the half of backward that gives it: the other half does all of it.
    """

    recorder: ActionRecorder
    inputs_move = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._whole: dict[int, Any] = {}  # losses of micro-batches whose backward the other half does, by number

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run one micro-batch forward."""
        with self.recorder.action(self.stage_index, fwd_chunk_id, "forward"):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Run one micro-batch backward, or the half of it that gives the gradient of the inputs."""
        if not full_backward and self.is_first:  # torch leaves all of it to the other half
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
            return
        if not full_backward and not self.inputs_move:
            self._whole[bwd_chunk_id], self.bwd_cache[bwd_chunk_id] = loss, (None,)
            return
        with self.recorder.action(self.stage_index, bwd_chunk_id, "backward" if full_backward else "input"):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Run the other half: the gradients of the parameters."""
        with self.recorder.action(self.stage_index, bwd_chunk_id, "weight"):
            if bwd_chunk_id in self._whole:
                super().backward_one_chunk(bwd_chunk_id, self._whole.pop(bwd_chunk_id), True, last_backward)
                self.bwd_cache.pop(bwd_chunk_id, None)
                return
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)

    def get_local_bwd_output(self, mb_index: int) -> Any:
        """Return the gradient for a stage of this rank; in evaluation, where torch asks for it too, nothing."""
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        """Take the gradient from a stage of this rank; in evaluation there is none."""
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)


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
