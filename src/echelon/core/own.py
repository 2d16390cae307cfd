"""What users name of their own: `module:name`, with arguments by the grammar of specs: `module:name(every=10)`."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import inspect
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echelon.core.errors import UserError, nearest
from echelon.core.spec import Spec, parse_spec, split_top_level

HUGGING_FACE = "hf:"
"""What begins the names of data sets of the Hugging Face library `datasets`: no module."""
TRANSFORMERS = "transformers/"
"""What begins the names of models that a folder of the library `transformers` describes."""


def code_file(name: str) -> str:
    """Return the file that importing `module:name` would run, or `built-in`; nothing where there is no such module.

    Looks as `find_own` does, the current folder first, and imports nothing, packages above the module neither.
    """
    module = name.partition(":")[0]
    if module in sys.modules:
        return getattr(sys.modules[module], "__file__", None) or "built-in"
    places: Sequence[str] | None = [str(Path.cwd()), *sys.path]
    origin, parts = "", module.split(".")
    for depth in range(len(parts)):
        package = ".".join(parts[: depth + 1])
        specs = (f.find_spec(package, places) for f in sys.meta_path if places is not None)
        spec = next((s for s in specs if s is not None), None)
        if spec is None:
            return ""
        origin = spec.origin or next(iter(spec.submodule_search_locations or ()), "")
        places = spec.submodule_search_locations
    return origin


_OBJECT = "object"  # in place of a module, of what Python gave that no name leads to


def of_object(value: object) -> str:
    """Return how a run's description names an object of a caller's, so that nothing else is taken for it later.

    >>> of_object(Path), of_object(Path("a"))
    ('pathlib:Path', 'object:PosixPath')
    """
    module, name = getattr(value, "__module__", ""), getattr(value, "__qualname__", "")
    if module not in ("", "__main__") and getattr(sys.modules.get(module), name, None) is value:
        return f"{module}:{name}"
    kind = value if isinstance(value, type) else type(value)
    return f"{_OBJECT}:{kind.__name__}"


def code_mark(value: object) -> str:
    """Return what tells code that no name leads to from other code: its qualified name, and a digest of its source.

    Comments and the file around it do not count. Where no source can be read, a function's compiled code stands for it.
    Empty for code that a name leads to.
    """
    if not is_nameless(of_object(value)):
        return ""
    while isinstance(value, functools.partial):
        value = value.func
    code = value if inspect.isroutine(value) or isinstance(value, type) else type(value)
    name, text = getattr(code, "__qualname__", ""), _source_of(code)
    return f"{name} ({hashlib.sha256(text.encode()).hexdigest()[:8]})" if text else name


def _source_of(code: Any) -> str:
    """Return the source of a function or a class in a form of its own; empty where there is none to read."""
    compiled = getattr(code, "__code__", None)
    try:
        if compiled is None or code.__name__ != "<lambda>":
            return ast.unparse(ast.parse(textwrap.dedent(inspect.getsource(code))))
        tree = ast.parse("".join(inspect.findsource(code)[0]))  # the lines of a lambda alone may be no whole statement
        places = [(line, column) for line, _, column, _ in compiled.co_positions() if line and column]
        around = [node for node in ast.walk(tree) if isinstance(node, ast.Lambda) and _holds(node, max(places))]
        return ast.unparse(max(around, key=lambda node: (node.lineno, node.col_offset)))
    except (OSError, TypeError, SyntaxError, ValueError):
        if compiled is None:
            return ""
        constants = [constant for constant in compiled.co_consts if not inspect.iscode(constant)]
        return repr((compiled.co_code, constants, compiled.co_names, compiled.co_varnames))


def _holds(node: ast.Lambda, place: tuple[int, int]) -> bool:
    end = (node.end_lineno or node.lineno, node.end_col_offset or 0)
    return (node.lineno, node.col_offset) <= place < end


def is_nameless(described: str) -> bool:
    """Whether what a description names was given from Python, and no name leads to it."""
    return described.startswith(f"{_OBJECT}:")


def calling(function: str, run: object, arguments: Sequence[str]) -> str:
    """Return a call of a function of `echelon` on a run, as one would type it.

    >>> calling("evaluate", "runs/a", ["model=..."])
    "echelon.evaluate('runs/a', model=...)"
    """
    return f"echelon.{function}({', '.join([repr(str(run)), *arguments])})"


def continuing(run: object, objects: Sequence[str] = (), **settings: object) -> str:
    """Return what continues a run, as one would type it.

    Args:
        objects: keywords by which it was given objects from Python, which it needs again.
        settings: that change.

    >>> continuing("runs/a", epochs=3), continuing("runs/a", ["model"], max_steps=0)
    ('echelon resume runs/a --epochs 3', "echelon.resume('runs/a', model=..., max_steps=0)")
    """
    if objects:
        values = [*(f"{name}=..." for name in objects), *(f"{name}={value!r}" for name, value in settings.items())]
        return calling("resume", run, values)
    flags = (f" --{name.replace('_', '-')} {value}" for name, value in settings.items())
    return f"echelon resume {run}{''.join(flags)}"


def find_own(what: str, name: str) -> Any:
    """Return what `module:name` names; the current folder is searched too, as `python -m` does.

    Args:
        what: is said before the name when there is no such thing: `--model`.

    Raises:
        UserError: there is no such module, or nothing of that name in it. What a module itself raises comes through.
    """
    module_name, _, own_name = name.partition(":")
    if module_name == _OBJECT:
        raise UserError(f"{what} {name}: it was an object given from Python, which the run's folder does not hold")
    if not module_name or module_name.startswith("."):
        raise UserError(f"{what} {name}: write module:function, the module importable from the current folder")
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise UserError(
            f"{what} {name}: there is no module {module_name!r}; write module:function, "
            "the module importable from the current folder"
        ) from error
    if not hasattr(module, own_name):
        functions = [each for each, value in vars(module).items() if callable(value) and not each.startswith("_")]
        raise UserError(
            f"{what} {name}: {module_name} has no {own_name!r}; {nearest(own_name, functions)}"
            f"it has: {', '.join(functions) or 'no functions'}"
        )
    return getattr(module, own_name)


@dataclass(frozen=True)
class OwnCall:
    """What a user names, with the arguments that it is called with.

    Attributes:
        name: `module:name`, or a name alone where it is not of a module of the user's.
        spec: the name behind the colon, and the arguments.
    """

    name: str
    spec: Spec

    @property
    def is_own(self) -> bool:
        """Whether it is of a module of the user's."""
        return ":" in self.name

    def build(self, what: str) -> Any:
        """Return what a class or a function of the user's gives for the arguments; another object as it is.

        Args:
            what: the setting, for refusals.

        Raises:
            UserError: it does not exist, or does not take these arguments.
        """
        found = find_own(what, self.name)
        if not (inspect.isclass(found) or inspect.isfunction(found)):
            if self.spec.args or self.spec.kwargs:
                raise UserError(f"{what} {self.name}: it is no class and no function, and takes no arguments")
            return found
        return call_with(found, self.spec, what)


def call_with(function: Any, spec: Spec, what: str) -> Any:
    """Call a class or a function with a spec's arguments.

    Raises:
        UserError: it does not take them; what it raises otherwise comes through.
    """
    arguments = dict(spec.kwargs)
    try:
        inspect.signature(function).bind(*spec.args, **arguments)
    except TypeError as error:
        raise UserError(f"{what} {spec}: {error}") from None
    except ValueError:
        pass  # it has no signature that could be looked at
    return function(*spec.args, **arguments)


def read_calls(text: str) -> list[OwnCall]:
    """Read names joined by `+`, each with its arguments.

    >>> [(call.name, str(call.spec)) for call in read_calls("mine:Timer(every=10)+F1Score")]
    [('mine:Timer', 'Timer(every=10)'), ('F1Score', 'F1Score')]

    Raises:
        UserError: one of them is no name with arguments.
    """
    calls = []
    for item in split_top_level(text, "+") if text.strip() else ():
        before, _, _ = item.partition("(")
        module, colon, _ = before.rpartition(":")
        spec = parse_spec(item[len(module) + len(colon) :])
        calls.append(OwnCall(f"{module.strip()}{colon}{spec.name}", spec))
    return calls
