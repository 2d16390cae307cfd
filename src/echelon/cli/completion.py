"""`echelon completion SHELL`: what a shell offers at the tab key, specs and their settings included; without torch.

The shell's script calls `echelon` with `_ECHELON_COMPLETE` set and the words of the line, the one at the cursor last.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import typer

from echelon.cli.app import COMMANDS, as_command, build_command
from echelon.cli.catalogue import kinds
from echelon.collectives.registry import PATHS
from echelon.compression.registry import CODECS
from echelon.config.build import flag_of, leaves
from echelon.core.errors import unknown
from echelon.core.registry import Registry
from echelon.sync.registry import STRATEGIES

VARIABLE = "_ECHELON_COMPLETE"
SCRIPTS = {
    "bash": """_echelon_complete() {
    local IFS=$'\\n'
    COMPREPLY=($(_ECHELON_COMPLETE=bash "$1" "${COMP_LINE:0:COMP_POINT}" 2>/dev/null))
}
complete -o default -o nospace -F _echelon_complete echelon""",
    "zsh": """_echelon_complete() {
    local -a offered
    offered=("${(@f)$(_ECHELON_COMPLETE=zsh "${words[1]}" "${(@Q)words[2,CURRENT]}" 2>/dev/null)}")
    if [[ -n "${offered[1]}" ]]; then compadd -S '' -a offered; else _files; fi
}
autoload -Uz compinit && compinit
compdef _echelon_complete echelon""",
    "fish": """function __echelon_complete
    set -l before (commandline -opc)
    env _ECHELON_COMPLETE=fish $before (commandline -ct) 2>/dev/null
end
complete -c echelon -a '(__echelon_complete)'""",
}
INSTALL = {
    "bash": 'add to ~/.bashrc:  eval "$(echelon completion bash)"',
    "zsh": 'add to ~/.zshrc:  eval "$(echelon completion zsh)"',
    "fish": "echelon completion fish > ~/.config/fish/completions/echelon.fish",
}
_BREAKS = "=(:"  # where bash begins a new word
_SPECS = {"sync": STRATEGIES, "compression": CODECS, "collective": PATHS}
_OF_RUNS = ("resume", "evaluate", "export", "report", "watch", "logs", "stop", "copy", "verify", "clean")


def completion_command() -> Any:
    """Build `echelon completion`."""

    def completion(shell: Annotated[str, typer.Argument(metavar="SHELL", help="bash, zsh or fish")]) -> None:
        """Print a shell's script."""
        if shell not in SCRIPTS:
            raise unknown("shell", shell, SCRIPTS)
        print(SCRIPTS[shell])

    ways = "\n".join(f"  {INSTALL[shell]}" for shell in SCRIPTS)
    return as_command(completion, "completion", f"{COMMANDS['completion'][1]}\n\nFor good:\n{ways}")


def offer(shell: str, arguments: list[str]) -> None:
    """Print what completes the last word, one a line, as the shell wants it."""
    if shell != "bash":
        print("\n".join(candidates(arguments[:-1], arguments[-1]) if arguments else ()))
        return
    line = arguments[0] if arguments else ""
    last = re.search(r"""(?:"[^"]*|'[^']*|\\.|[^\s"'\\]|"[^"]*"|'[^']*')*$""", line)
    raw = last[0] if last else ""
    quoted = raw[:1] in ("'", '"')
    words = _split(line[: len(line) - len(raw)])[1:]
    for candidate in candidates(words, re.sub(r"\\(.)", r"\1", raw.lstrip("'\""))):
        shown = candidate if quoted else re.sub(r"([()\"' ;&|<>*])", r"\\\1", candidate)
        print(shown if quoted else shown[_begin_of_word(raw) :])


def _begin_of_word(raw: str) -> int:
    return max((raw.rfind(c) + 1 for c in _BREAKS), default=0)


def _split(line: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError:  # an open quote
        return line.split()


def candidates(before: list[str], incomplete: str) -> list[str]:
    """Return what the last word may become, given the ones `before` it."""
    command = next((word for word in before if word in COMMANDS), "")
    if not command:
        return _beginning(incomplete, [*COMMANDS, "--help", "--version"])
    settings = _settings()
    if before[-1].startswith("--") and before[-1] in settings:
        return _beginning(incomplete, settings[before[-1]](incomplete))
    if incomplete.startswith("-"):
        parameters = build_command(command).params
        return _beginning(incomplete, [flag for p in parameters for flag in (*p.opts, *p.secondary_opts)])
    return _beginning(incomplete, _arguments(command))


def _arguments(command: str) -> list[str]:
    if command in _OF_RUNS:
        return sorted(str(file.parent) for file in Path("runs").glob("*/config.yaml"))
    entries = {kind.title: list(kind.all_names()) for kind in kinds()}
    if command == "explain":
        return [name for names in entries.values() for name in names]
    others = {"list": list(entries), "completion": list(SCRIPTS), "train": entries["sources"]}
    return others.get(command, entries["sources"] if command == "compare" else [])


def _beginning(incomplete: str, known: Iterable[str]) -> list[str]:
    return [each for each in dict.fromkeys(known) if each.startswith(incomplete)]


def _settings() -> Mapping[str, Callable[[str], Iterable[str]]]:
    """Return, by flag, what gives the values of a setting that takes one."""
    values: dict[str, Callable[[str], Iterable[str]]] = {}
    for name, item, kind in leaves():
        leaf = name.rpartition(".")[2]
        if kind is bool:
            continue
        if leaf in _SPECS:
            values[flag_of(name, item)] = _spec_values(_SPECS[leaf])
        elif get_origin(kind) is not None:
            values[flag_of(name, item)] = _same(get_args(kind))
        else:
            values[flag_of(name, item)] = _same(_names_of(flag_of(name, item)))
    return values


def _same(values: Iterable[str]) -> Callable[[str], Iterable[str]]:
    return lambda _: values


def _names_of(flag: str) -> list[str]:
    if flag == "--parallel":
        return ["dp=", "fsdp=", "tp=", "pp="]
    if flag not in ("--model", "--optimizer", "--task", "--on"):
        return []
    names = [name for kind in kinds() if kind.flag == flag for name in kind.all_names()]
    return [name.removesuffix("NAME").removesuffix("module:function").removesuffix("module:Class") for name in names]


def _spec_values(registry: Registry) -> Callable[[str], Iterator[str]]:
    def values(incomplete: str) -> Iterator[str]:
        """Yield names; within parentheses the settings that are left."""
        inside = re.fullmatch(r"([\w-]+)\((.*?)(\w*)", incomplete, re.DOTALL)
        for name in registry.names():
            arguments = registry.declaration(name).arguments
            if inside is not None and inside[1] == name:
                given = inside[2]
                yield from (f"{name}({given}{a.name}=" for a in arguments if f"{a.name}=" not in given)
                continue
            if any(a.default is None for a in arguments):
                yield f"{name}("
                continue
            yield name
            if arguments:
                yield f"{name}("

    return values
