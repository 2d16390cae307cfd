"""What a flow's file names has to be there before anything starts: modules, programs, data, runs, kinds of files.

What a step names that waits for others is not looked for: they may make it.
"""

from __future__ import annotations

import ast
import importlib.util
import shutil
from collections.abc import Iterator
from pathlib import Path

from echelon.core.errors import UserError, nearest
from echelon.flows.base import TOKEN, Flow, FlowStep, Leaves
from echelon.flows.fingerprint import module_file
from echelon.flows.kinds import KINDS
from echelon.run.export_names import export_format
from echelon.trainer.folder import CONFIG_FILE

_TRAINED_ON = "data"


def check_named(flow: Flow, here: bool) -> None:
    """Refuse what steps name and what is not there.

    Args:
        here: steps run on this machine, whose programs they use.

    Raises:
        UserError: names the line and the step.
    """
    for step in flow.steps.values():
        try:
            if step.kind == "export":
                _check_suffix(step.arguments[1])
            if step.before:
                continue
            if step.kind == "prepare":
                _check_function(flow.base, step.arguments[0])
            elif step.kind == "command" and here:
                _check_program(flow.base, step.arguments[0])
            else:
                _check_paths(flow.base, step)
        except UserError as error:
            raise UserError(f"{step.where}: step {step.group}: {error}") from None


def _check_suffix(file: str) -> None:
    if not TOKEN.search(file):
        export_format(Path(file))


def _check_program(base: Path, word: str) -> None:
    if TOKEN.search(word) or shutil.which(word) or (base / word).is_file():
        return
    raise UserError(f"there is no program {word}")


def _check_paths(base: Path, step: FlowStep) -> None:
    """Refuse runs and folders of data that are not there; names of data are known without a folder."""
    takes = KINDS[step.kind].takes
    for i, text in enumerate(step.arguments):
        taken = takes[min(i, len(takes) - 1)]
        path = base / Path(text).expanduser()
        if TOKEN.search(text):
            continue
        if taken.kind is Leaves.RUN and not (path / CONFIG_FILE).exists():
            raise UserError(f"{step.kind} takes a run, and {text} holds none: ${{STEP.run}} is what a step leaves")
        if taken.name == _TRAINED_ON and ":" not in text and "/" in text and not path.exists():
            raise UserError(f"{step.kind} takes data, and {text} is not there")


def _check_function(base: Path, name: str) -> None:
    module, _, function = name.partition(":")
    file = module_file(base, module)
    if file is None:
        if importlib.util.find_spec(module.partition(".")[0]) is None:
            raise UserError(f"there is no module {module}: it is looked for beside the flow's file")
        return
    try:
        known = set(_names(ast.parse(file.read_bytes())))
    except SyntaxError as error:
        raise UserError(f"{file}, line {error.lineno}: {error.msg}") from None
    if function not in known and "*" not in known:
        raise UserError(f"{file} has no {function}: {nearest(function, sorted(known))}".rstrip(": "))


def _names(module: ast.Module) -> Iterator[str]:
    """Yield what a module may define; `*`: what cannot be told."""
    for node in module.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield "*" if node.name == "__getattr__" else node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
        elif not isinstance(node, ast.Expr):
            yield from (each.id for each in ast.walk(node) if isinstance(each, ast.Name))
            if isinstance(node, ast.If | ast.Try | ast.With):
                yield "*"
