"""Pictures of pages, as wide as a laptop's window and as a phone."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from PIL import Image

WIDTHS = (1400, 390)
_TALLEST = 16000
_TILE = 2200
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--virtual-time-budget=8000",
)  # fmt: skip
_PHONE = '<body style="margin:0"><iframe src="{page}" style="width:{width}px;height:{height}px;border:0"></iframe>'


def photograph(page: str, width: int, folder: Path, name: str) -> list[Path]:
    """Take pictures of a page from its top to its end, one below the other.

    Args:
        page: its address.
        name: the pictures' names begin with it.
    """
    assert CHROMIUM is not None
    shot = folder / f"{name}-{width}.png"
    address = page
    if width < 500 and page.startswith("file:"):  # a window is no narrower than that, but a frame is
        frame = folder / f"{name}-{width}.html"
        frame.write_text(_PHONE.format(page=page, width=width, height=_TALLEST))
        address = frame.as_uri()
    subprocess.run(
        [CHROMIUM, *_FLAGS, f"--user-data-dir={folder / 'profile'}", f"--window-size={width},{_TALLEST}",
         f"--screenshot={shot}", address],
        capture_output=True, check=True, timeout=120,
    )  # fmt: skip
    with Image.open(shot) as opened:
        image = opened.convert("RGB").crop((0, 0, width, opened.height))
    image = image.crop((0, 0, width, _last_row(image)))
    shot.unlink()
    tiles = []
    for number, top in enumerate(range(0, image.height, _TILE), 1):
        tiles.append(folder / f"{name}-{width}-{number}.png")
        image.crop((0, top, width, min(image.height, top + _TILE))).save(tiles[-1])
    return tiles


def _last_row(image: Image.Image) -> int:
    """Return the height without the empty rows at the end."""
    from PIL import ImageChops

    blank = Image.new("RGB", image.size, image.getpixel((0, image.height - 1)))  # type: ignore[arg-type]
    box = ImageChops.difference(image, blank).getbbox()
    return image.height if box is None else min(image.height, box[3] + 20)
