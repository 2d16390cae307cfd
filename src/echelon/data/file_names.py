"""What files of samples are called: tables, tar archives. It imports nothing: each name of data is looked at by it."""

from __future__ import annotations

TABLES = (".csv", ".tsv", ".jsonl", ".parquet")
COMPRESSED = {".gz": "gzip", ".tgz": "gzip", ".bz2": "bzip2", ".xz": "xz", ".zst": "zstd"}  # refused, by suffix
_TAR = ".tar"


def is_tar(name: str) -> bool:
    """Whether a file's name is that of a tar archive, compressed or not.

    >>> is_tar("a-000.tar"), is_tar("a.tar.gz"), is_tar("a.csv")
    (True, True, False)
    """
    name = name.lower()
    return name.endswith((_TAR, ".tgz")) or any(name.endswith(_TAR + suffix) for suffix in COMPRESSED)
