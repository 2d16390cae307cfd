"""One name for one thing, and the field's: names that were given up do not come back."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import echelon

PACKAGE = Path(echelon.__file__).parent
CLASSES = {
    "Seat": "VoterSetup", "Kept": "VoterState, StateBytes", "Held": "CodecShard",
    "Pieces": "MessageCutter, LocalShards", "Bench": "WorkerModel", "Words": "CommandChannel", "Voice": "Sender",
    "Line": "Channel", "Conversation": "Connection", "Giving": "PullHandler", "Fate": "PushOutcome",
    "Roster": "Membership", "Review": "Evaluation", "Cell": "Bucket", "Lane": "CommThread", "Post": "Mailbox",
    "CodedSum": "CompressedAllReduce", "LinearSum": "LinearAllReduce", "Assembly": "ShardGather",
    "Unmade": "DeferredInit", "Flight": "PendingAverage", "Story": "LiveState", "Standing": "RankStatus",
    "Mark": "Entry",
}  # fmt: skip
"""Names of classes that were given up, and what each is called now."""
FIELDS = {"unmade": "deferred", "flight": "pending", "fate": "outcome", "seat": "setup", "served": "waits_for_servers"}
"""Names of fields, parameters and variables, likewise."""
STORED = {("records/kinds.py", "served")}
"""What is stored under such a name, and so is read under it for ever."""


def names(tree: ast.Module) -> Iterator[tuple[str, bool]]:
    """Yield what a module names, and whether it is a class."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield node.name.strip("_"), True
        elif isinstance(node, ast.arg):
            yield node.arg, False
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id.strip("_"), False
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr.strip("_"), False
        elif isinstance(node, ast.FunctionDef):
            yield node.name.strip("_"), False


def test_names_that_were_given_up_stay_so() -> None:
    back = []
    for file in sorted(PACKAGE.rglob("*.py")):
        place = file.relative_to(PACKAGE).as_posix()
        for name, is_class in names(ast.parse(file.read_text())):
            now = (CLASSES if is_class else FIELDS).get(name)
            if now and (place, name) not in STORED:
                back.append(f"{place}: {name}, now {now}")
    assert not back
