"""Who is blamed, given what all processes are at."""

from __future__ import annotations

import pytest

from echelon.launch.culprit import Living, Observed, find_hang, find_standstill
from echelon.observe.notes import Note
from echelon.observe.stacks import Stack, StackFrame
from echelon.observe.tcp import TcpState

USER = Stack(
    (
        StackFrame("/home/me/net.py", 12, "forward"),
        StackFrame("/v/site-packages/torch/nn/modules/module.py", 9, "_call_impl"),
    )
)
BACKWARD = Stack((StackFrame("/v/site-packages/torch/autograd/graph.py", 8, "_engine_run_backward"), *USER.frames))


def in_collective(name: str) -> Stack:
    """Return the stack of a rank that is in a collective."""
    c10d = "/v/site-packages/torch/distributed/distributed_c10d.py"
    return Stack(
        (
            StackFrame(c10d, 3, name),
            StackFrame("/v/site-packages/torch/distributed/c10d_logger.py", 5, "wrapper"),
            *USER.frames,
        )
    )


def at(rank: int, activity: str, stack: Stack | None = None, still_s: float = 60.0, **more: object) -> Observed:
    """Return a rank that is in an activity."""
    note = Note(activity, 120, 0.0, 7, 100 + rank, 1, True, bool(more.pop("failed", False)))
    return Observed(Living(f"rank{rank}", "h", 100 + rank, rank), note, still_s, stack, **more)  # type: ignore[arg-type]


WAITING = at(0, "communicate", BACKWARD)


@pytest.mark.parametrize(
    ("observed", "culprit"),
    [
        pytest.param([WAITING, at(1, "forward", USER)], 1, id="sleeps in forward"),
        pytest.param([at(0, "forward", in_collective("all_gather")), at(1, "forward", USER)], 1, id="sharded"),
        pytest.param([WAITING, at(1, "backward", BACKWARD)], 1, id="backward that has not handed its gradients over"),
        pytest.param([WAITING, at(1, "forward", None, is_stopped=True)], 1, id="stopped"),
        pytest.param([WAITING, at(1, "communicate", USER)], 1, id="user's code where others communicate"),
        pytest.param([at(0, "forward", None, failed=True), at(1, "data", USER)], 1, id="one has given up"),
        pytest.param([WAITING, at(1, "forward", USER, 70), at(2, "forward", USER, 50)], 1, id="the longest"),
        pytest.param([WAITING, at(1, "forward", USER, 2)], None, id="it goes on"),
        pytest.param([at(0, "forward", USER), at(1, "evaluation", USER)], None, id="nobody waits"),
        pytest.param([WAITING, at(1, "forward", in_collective("broadcast"))], None, id="all wait"),
        pytest.param([WAITING, at(1, "serving", USER)], None, id="a server that is at work"),
    ],
)
def test_who_does_not_wait_is_blamed(observed: list[Observed], culprit: int | None) -> None:
    hang = find_hang(observed, 100.0, 5.0)
    assert (hang.process.rank if hang else None) == culprit


def test_the_sentence_names_the_phase_the_line_and_who_waits_in_what() -> None:
    observed = [at(0, "backward", in_collective("all_reduce")), at(2, "backward", in_collective("all_reduce"))]
    hang = find_hang([*observed, at(1, "forward", USER)], 60.0, 5.0)
    assert hang is not None
    assert hang.sentence(62.0) == (
        "rank 1 (pid 101 on h) has been in forward (model code) for 1m 2s, at step 120 (net.py:12 in forward); "
        "ranks 0, 2 wait for it in all_reduce"
    )


def test_where_all_wait_it_is_what_is_between_them() -> None:
    own, silent = ("10.0.0.1",), ("10.0.0.2",)
    tcp = [TcpState(own, silent), TcpState(silent)]
    pair = [at(i, "communicate", in_collective("all_reduce"), tcp=tcp[i]) for i in range(2)]
    standstill = find_standstill(pair, 60.0, 5.0)
    assert standstill is not None
    assert "rank 0 gets no answer from 10.0.0.2 (rank 1)" in standstill.sentence(60.0)
    differing = [at(0, "update", in_collective("all_reduce")), at(1, "update", in_collective("barrier"))]
    standstill = find_standstill(differing, 60.0, 5.0)
    assert standstill is not None and "rank 0 in all_reduce, rank 1 in barrier" in standstill.sentence(60.0)
    assert find_standstill([WAITING, at(1, "forward", USER)], 60.0, 5.0) is None


def test_a_shortened_stack_is_judged_as_the_long_one() -> None:
    carriers = tuple(StackFrame("/v/site-packages/torch/_ops.py", i, "call") for i in range(20))
    recursion = (StackFrame("/v/site-packages/pytree.py", 4, "walk"),) * 900
    long = Stack((*carriers, *in_collective("all_gather").frames, *recursion, *USER.frames))
    short = long.shortened(12)
    assert len(short.frames) < 20
    for stack in (long, short):
        assert stack.waits and stack.collective == "all_gather" and stack.of_user == USER.frames[0]
