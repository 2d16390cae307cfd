"""The library of C loops: compiled once for a machine, kept in the user's cache folder, loaded once in a process.

Its name holds a hash of the source, the compiler, its flags and the processor, so that machines that share a home
folder have one each. Several processes may compile it at once: each renames a whole file into place. A file ends in
the hash of what precedes, which the loader of libraries does not look at: one that was cut short would end the process.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from pathlib import Path

from echelon.core.errors import UserError

VARIABLE = "ECHELON_NATIVE"
_BITS = ("-O3", "-march=native", "-ffp-contract=off", "-fno-fast-math")  # whatever $CC asks for
_FLAGS = ("-std=gnu11", *_BITS, "-fPIC", "-shared", "-fvisibility=hidden", "-w")
_PATIENCE_S = 20.0
_DIGEST_BYTES = 32
_CPU_FIELDS = ("vendor_id", "cpu family", "model", "model name", "stepping", "flags", "CPU part", "Features")


class NativeError(Exception):
    """There is no library; says why."""


@dataclass(frozen=True)
class Loaded:
    """What became of the library in this process.

    Attributes:
        library: None: there is none.
        reason: why there is none.
    """

    library: ctypes.CDLL | None
    reason: str = ""


@lru_cache(maxsize=1)
def load() -> Loaded:
    """Return the library, which is compiled (in about half a second) where this machine has not done so.

    Raises:
        UserError: the environment variable that switches it off has another value.
    """
    try:
        return Loaded(_load())
    except NativeError as error:
        return Loaded(None, str(error))
    except OSError as error:
        return Loaded(None, f"the loops cannot be compiled: {error}")


def _load() -> ctypes.CDLL:
    setting = os.environ.get(VARIABLE, "on")
    if setting not in ("on", "off"):
        raise UserError(f"{VARIABLE}={setting}: the value must be on (compile loops of the codecs, the default) or off")
    if setting == "off":
        raise NativeError(f"{VARIABLE}=off")
    if sys.byteorder != "little":
        raise NativeError("the compiled loops need a little-endian processor")
    compiler = _compiler()
    source = resources.files("echelon.compression.native").joinpath("kernels.c").read_bytes()
    version = _run([*compiler, "--version"])
    key = [source, version.encode(), shlex.join([*compiler, *_FLAGS]).encode(), _processor().encode()]
    name = f"kernels-{hashlib.sha256(b'|'.join(key)).hexdigest()[:24]}.so"
    if (folder := _cache_folder()) is None:
        with tempfile.TemporaryDirectory(prefix="echelon-", ignore_cleanup_errors=True) as scratch:
            return _open(_compile(compiler, source, Path(scratch) / name))
    path = folder / name
    return _open(path if path.exists() and _is_intact(path) else _compile(compiler, source, path))


def _compiler() -> list[str]:
    """Return the C compiler's command: $CC, or `cc`."""
    try:
        command = shlex.split(os.environ.get("CC", "")) or ["cc"]
    except ValueError as error:
        raise NativeError(f"CC={os.environ['CC']} is no command: {error}") from error
    if shutil.which(command[0]) is None:
        raise NativeError(f"there is no C compiler ({command[0]}) on this machine")
    return command


def _processor() -> str:
    """Describe what `-march=native` depends on."""
    lines = {platform.machine(): ""}
    with suppress(OSError):  # without it a home folder shared by unequal processors of one architecture is not safe
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            field, _, value = line.partition(":")
            if field.strip() in _CPU_FIELDS:
                lines.setdefault(field.strip(), value.strip())
    return repr(lines)


def _cache_folder() -> Path | None:
    """Return the folder of compiled libraries, made where there is none; None: it cannot be written, or others may."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        folder = (cache if cache.is_absolute() else Path.home() / ".cache") / "echelon" / "kernels"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except (OSError, RuntimeError):  # a user without a home folder has none of either kind
        return None
    is_own = status.st_uid == os.geteuid() and not status.st_mode & 0o022  # what is there is run
    return folder if is_own and os.access(folder, os.W_OK) else None


def _compile(compiler: list[str], source: bytes, path: Path) -> Path:
    with tempfile.TemporaryDirectory(prefix=".compile-", dir=path.parent, ignore_cleanup_errors=True) as scratch:
        written, made = Path(scratch) / "kernels.c", Path(scratch) / path.name
        written.write_bytes(source)
        _run([*compiler, *_FLAGS, str(written), "-o", str(made), "-lm"])
        code = made.read_bytes()
        with made.open("ab") as file:
            file.write(hashlib.sha256(code).digest())
            file.flush()
            os.fsync(file.fileno())  # a name of an empty file, after a crash, would stay
        made.replace(path)
    return path


def _is_intact(path: Path) -> bool:
    code = path.read_bytes()
    return hashlib.sha256(code[:-_DIGEST_BYTES]).digest() == code[-_DIGEST_BYTES:]


def _run(command: list[str], patience_s: float = _PATIENCE_S) -> str:
    """Run a command to its end; returns what it wrote.

    Raises:
        NativeError: it failed, or took longer.
    """
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "LC_ALL": "C"},  # one file for all languages
            start_new_session=True,
        )
        try:
            code = process.wait(patience_s)
        except subprocess.TimeoutExpired:
            raise NativeError(f"{command[0]} took more than {patience_s:g} s") from None
        finally:
            _end(process)
        output.seek(0)
        text = output.read()
    if code:
        first = next((line for line in text.splitlines() if "error" in line), text)
        raise NativeError(f"{command[0]} failed with code {code}: {' '.join(first.split())[:200]}")
    return text


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process that has not ended, and what it has started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # what waits for a dead mount does not end
            process.wait(1)


def _open(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeError(f"{path} cannot be loaded: {error}") from error
