"""Code that a description names (`module:name`): imported only if its user named it, or trusts who did.

What a user names on the command line or in Python is remembered, by name and file. A description in a file, which may
be anyone's, may then name the same code; other code is refused, or with `--trust` said, imported and remembered.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from echelon.config import RunConfig
from echelon.config.build import COMMAND_LINE, Resolved, flag_of, leaves
from echelon.config.schema import traits_of
from echelon.core.errors import UserError
from echelon.core.own import HUGGING_FACE, code_file, read_calls
from echelon.core.tuning import code_of
from echelon.launch.places import is_own
from echelon.run.machine import say
from echelon.run.notify import is_webhook
from echelon.storage.url import is_url

KNOWN_FILE = "known-code.jsonl"
TUNE = "model.tune"  # kinds of tuning, some of which name code
NOTIFY = "tracking.notify"
_LIBRARIES = ("timm/", "torchvision/")


@dataclass(frozen=True)
class NamedCode:
    """Code that a setting names.

    Attributes:
        setting: its dotted name.
        name: `module:name`.
        file: what importing it would run.
        owner: user id of that file's owner; -1 where it is no file.
    """

    setting: str
    name: str
    file: str
    owner: int


def check_trust(resolved: Resolved, trust: bool) -> None:
    """Refuse code that a file names, unless this user has named it before; what is imported from now on is remembered.

    Args:
        trust: import it all the same, and say so.

    Raises:
        UserError: names the code, the line that names it, and the file that would be imported.
    """
    values = {name: _value(resolved.config, name) for name in (*_code_settings(), NOTIFY)}
    check_settings(values, resolved.origins, trust)


def check_settings(values: Mapping[str, str], origins: Mapping[str, str], trust: bool) -> None:
    """Do what `check_trust` does for some settings, by dotted name, each with its origin.

    Raises:
        UserError: as `check_trust`.
    """
    known, used = KnownCode.of_this_user(), []
    for code in named_code(values):
        origin = origins[code.setting]
        if origin != COMMAND_LINE and not known.trusts(code, origin):
            flag, does = _code_settings().get(code.setting, "--notify"), "run" if code.setting == NOTIFY else "import"
            if not trust:
                raise UserError(
                    f"{origin}: {flag} {code.name} would {does} {code.file}, which you have not used before: "
                    "give --trust (in Python, trust=True) if it may run as you"
                )
            say(f"{origin}: {flag} {code.name}: {'running' if does == 'run' else 'importing'} {code.file}")
        used.append(code)
    known.add(used)


def named_code(values: Mapping[str, str]) -> Iterator[NamedCode]:
    """Yield the code that settings name, by dotted name; what does not exist is left out. Imports nothing."""
    if (told := values.get(NOTIFY, "")) and not is_webhook(told) and (program := shutil.which(told)):
        yield NamedCode(NOTIFY, told, str(Path(program).absolute()), Path(program).stat().st_uid)
    for setting in _code_settings():
        for name in _names_in(setting, values.get(setting, "")):
            if _is_code(setting, name) and (file := code_file(name)):
                path = Path(file)
                yield NamedCode(setting, name, file, path.stat().st_uid if path.exists() else -1)


def _names_in(setting: str, value: str) -> list[str]:
    """Return what may be code in a setting's value: all of it, or the names of calls without their arguments."""
    if setting == TUNE:
        return code_of(value) if value else []
    return [call.name for call in read_calls(value)] if setting in _call_settings() else [value]


def _call_settings() -> set[str]:
    return {name for name, item, _ in leaves() if traits_of(item).code == "calls"}


def _is_code(setting: str, value: str) -> bool:
    """Whether a value is code, as `build_model`, `open_data` and the others read it."""
    if ":" not in value:
        return False
    if setting == "launch.on":
        return is_own(value)
    if setting == "data.source":
        return not is_url(value) and not value.startswith(HUGGING_FACE) and not Path(value).expanduser().exists()
    return setting != "model.name" or not value.startswith(_LIBRARIES)


def _code_settings() -> dict[str, str]:
    """Return the flags of the settings that may name code."""
    return {name: flag_of(name, item) for name, item, _ in leaves() if traits_of(item).code}


def _value(config: RunConfig, name: str) -> str:
    value: object = config
    for part in name.split("."):
        value = getattr(value, part)
    return str(value)


class KnownCode:
    """Code that this user has named, or trusted, in a file of the user's state folder that nobody else can write."""

    def __init__(self, folder: Path | None) -> None:
        """Read what is known; a folder that is not there yet is made when something is added."""
        self._file = folder / KNOWN_FILE if folder is not None else None
        self._known = set(self._read())

    @classmethod
    def of_this_user(cls) -> KnownCode:
        """Return what the user of this process has named: in `$XDG_STATE_HOME/echelon`, or `~/.local/state/echelon`."""
        state = Path(os.environ.get("XDG_STATE_HOME", ""))
        if state.is_absolute():
            return cls(state / "echelon")
        try:
            return cls(Path.home() / ".local/state/echelon")
        except RuntimeError:  # this user has no home
            return cls(None)

    def trusts(self, code: NamedCode, origin: str) -> bool:
        """Whether code is known.

        Where nothing can be remembered, as in a read-only home: whether the file that names it, which `origin` begins
        with, and the code are both this user's, and nobody else can write them.
        """
        if code in self._known or self._can_remember():
            return code in self._known
        return all(_is_private(Path(file)) for file in (origin.rpartition(", line ")[0] or origin, code.file))

    def add(self, codes: Iterable[NamedCode]) -> None:
        """Remember code. Where that is not possible, files' owners decide (`trusts`)."""
        new = [code for code in codes if code not in self._known]
        if not new or self._file is None or not self._can_remember():
            return
        self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write("".join(json.dumps(asdict(code)) + "\n" for code in new))
        self._known.update(new)

    def _read(self) -> Iterator[NamedCode]:
        if self._file is None or not os.access(self._file, os.R_OK) or not _is_private(self._file):
            return
        for line in self._file.read_text(encoding="utf-8").splitlines():
            try:
                yield NamedCode(**json.loads(line))
            except (ValueError, TypeError):
                continue  # torn by a full disk, or of another version: that code is asked about again

    def _can_remember(self) -> bool:
        if self._file is None:
            return False
        there = next(path for path in (self._file, *self._file.parents) if path.exists())
        return os.access(there, os.W_OK)


def _is_private(path: Path) -> bool:
    """Whether a file and its folder are this user's or root's, and nobody else can write them."""
    for each in (path, path.absolute().parent):
        try:
            status = each.stat()
        except OSError:
            return False
        if status.st_uid not in (0, os.geteuid()) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return False
    return True
