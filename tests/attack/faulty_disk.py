"""A disk that fails on demand: a small one that is full, or a library between processes and the system's calls.

The library is compiled from a page of C and loaded with LD_PRELOAD. While a file exists, each call that opens for
writing, writes, renames, makes or flushes something below a folder fails with the error whose number the file holds.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.attack.scenario import CannotRunHere

SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>
#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
static int fault(const char *path) {
    const char *flag = getenv("FAULT_FLAG"), *below = getenv("FAULT_BELOW");
    if (!flag || !below || !path || !strstr(path, below)) return 0;
    int fd = REAL(open)(flag, O_RDONLY);
    if (fd < 0) return 0;
    char text[16] = {0};
    ssize_t n = read(fd, text, sizeof text - 1);
    close(fd);
    return n > 0 ? atoi(text) : 0;
}
static int fault_fd(int fd) {
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    if (n < 0) return 0;
    path[n] = 0;
    return fault(path);
}
#define FAIL_IF(e) do { int e_ = (e); if (e_) { errno = e_; return -1; } } while (0)
#define OPEN(name) \
    int name(const char *path, int flags, ...) { \
        va_list a; va_start(a, flags); mode_t mode = va_arg(a, mode_t); va_end(a); \
        if (flags & (O_WRONLY | O_RDWR | O_CREAT)) FAIL_IF(fault(path)); \
        return REAL(name)(path, flags, mode); }
OPEN(open) OPEN(open64)
int openat(int dir, const char *path, int flags, ...) {
    va_list a; va_start(a, flags); mode_t mode = va_arg(a, mode_t); va_end(a);
    if (flags & (O_WRONLY | O_RDWR | O_CREAT)) FAIL_IF(fault(path));
    return REAL(openat)(dir, path, flags, mode); }
ssize_t write(int fd, const void *data, size_t n) { FAIL_IF(fault_fd(fd)); return REAL(write)(fd, data, n); }
ssize_t writev(int fd, const struct iovec *v, int n) { FAIL_IF(fault_fd(fd)); return REAL(writev)(fd, v, n); }
int fsync(int fd) { FAIL_IF(fault_fd(fd)); return REAL(fsync)(fd); }
int rename(const char *a, const char *b) { FAIL_IF(fault(b)); return REAL(rename)(a, b); }
int mkdir(const char *path, mode_t mode) { FAIL_IF(fault(path)); return REAL(mkdir)(path, mode); }
"""


class FaultyDisk:
    """What lies below a folder fails while a fault is switched on, in processes that have `environment`."""

    def __init__(self, work: Path, below: Path) -> None:
        """Compile the library into a folder.

        Raises:
            CannotRunHere: there is no compiler.
        """
        compiler = shutil.which("gcc") or shutil.which("cc")
        if compiler is None:
            raise CannotRunHere("there is no C compiler")
        source, library, self._flag = work / "fault.c", work / "fault.so", work / "fault.flag"
        source.write_text(SOURCE)
        built = subprocess.run(
            [compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], capture_output=True, text=True
        )
        if built.returncode:
            raise CannotRunHere(f"the library cannot be compiled: {built.stderr.strip()[-200:]}")
        self.environment = {
            "LD_PRELOAD": str(library), "FAULT_FLAG": str(self._flag), "FAULT_BELOW": str(below)
        }  # fmt: skip

    def fail(self, code: int) -> None:
        """Let writing fail from now on, with an error's number."""
        unfinished = self._flag.with_suffix(".new")
        unfinished.write_text(str(code))
        unfinished.rename(self._flag)

    def work(self) -> None:
        """Let writing work again."""
        self._flag.unlink()


class SmallDisk:
    """A mounted disk of some megabytes."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._filler = folder, folder / "filler"

    def fill(self) -> None:
        """Leave no room."""
        fd = os.open(self._filler, os.O_WRONLY | os.O_CREAT)
        try:
            while True:
                os.write(fd, bytes(4096))
        except OSError:
            return
        finally:
            os.close(fd)

    def free(self) -> None:
        """Give the room back."""
        self._filler.unlink()


@contextmanager
def small_disk(folder: Path, megabytes: int = 64) -> Iterator[SmallDisk]:
    """Mount a disk of its own at a folder.

    Raises:
        CannotRunHere: this user may not mount one.
    """
    if os.geteuid() != 0 or shutil.which("mount") is None:
        raise CannotRunHere("mounting a small disk needs root")
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", folder], capture_output=True, text=True
    )
    if done.returncode:
        raise CannotRunHere(f"a small disk cannot be mounted: {done.stderr.strip()}")
    try:
        yield SmallDisk(folder)
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)
