"""Files to predict that lie at URLs: brought through the cache of data, and called by their URLs in what is said."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from echelon.config import DataConfig
from echelon.core.errors import UserError
from echelon.data.by_url import local_files
from echelon.storage.url import check_url, folder_of_url


@dataclass(frozen=True)
class BroughtFiles:
    """Files, and folders of them, by the URLs that they were brought from."""

    paths: Mapping[str, Path]

    @classmethod
    def of(cls, urls: Sequence[str], endings: tuple[str, ...], config: DataConfig) -> BroughtFiles:
        """Bring what lies at URLs to this machine; what a `file://` URL names stays where it is.

        Args:
            endings: of the files that a run's samples may be in; empty: they are in none.
            config: of the run's data, whose cache and limit are used.

        Raises:
            UserError: there is none of these files, there is no room for them, or a store cannot be used.
        """
        if not endings:
            raise UserError(f"{urls[0]}: this run's samples are arrays, which are not read by URL")
        here = {url: folder_of_url(check_url(url)) for url in urls}
        return cls({url: path or local_files(url, endings, config) for url, path in here.items()})

    def name_at_url(self, name: str | int) -> str | int:
        """Return a sample's name with the URL in place of where it was brought."""
        for url, path in self.paths.items():
            if isinstance(name, str) and (name == str(path) or name.startswith(f"{path}/")):
                return f"{url.rstrip('/')}{name[len(str(path)) :]}"
        return name
