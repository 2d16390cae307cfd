"""Where published weights lie: of timm, torchvision and transformers, or of a name on the Hugging Face hub.

What was downloaded before is found without a network; else it is brought by the library that knows how, once, by the
process that starts a run. Without a network that is refused at once, with where it was looked for.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlparse

from echelon.core.errors import UserError

PRETRAINED = "pretrained"
HUB = "hf:"
FILES = ("model.safetensors", "pytorch_model.bin")
OF_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "pytorch_model.bin.index.json")
REACHED_WITHIN_S = 3.0

Pixels = tuple[float, ...]
HALF: tuple[Pixels, Pixels] = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
T = TypeVar("T")


def locate_weights(weights: str, model_name: str, brings: bool = False) -> Path:
    """Return the file or folder that `--weights` means.

    Args:
        weights: a path, `hf:FOLDER_OR_NAME`, or `pretrained`.
        model_name: as described, whose pretrained weights are meant.
        brings: download what is not on this machine.

    Raises:
        UserError: it is not there, nor can it be brought; or no such weights are known for the model.
    """
    if weights == PRETRAINED:
        library, _, name = model_name.partition("/")
        if library == "timm" and name:
            return _of_timm(name, brings)
        if library == "torchvision" and name:
            return _of_torchvision(name, brings)
        if library == "transformers" and name:
            return Path(name).expanduser()
        raise UserError(
            f"--weights pretrained: {model_name} has none: name a timm/, torchvision/ or transformers/ model, or a file"
        )
    if not weights.startswith(HUB):
        return Path(weights).expanduser()
    name = weights.removeprefix(HUB)
    folder = Path(name).expanduser()
    return folder if folder.exists() else _of_hub(name, brings)


def folder_of_weights(weights: str) -> Path | None:
    """Return the path that `--weights` writes, whether or not something is there; None: it means published weights."""
    return None if weights == PRETRAINED else Path(weights.removeprefix(HUB)).expanduser()


def pixels_of(weights: str, model_name: str) -> tuple[Pixels, Pixels] | None:
    """Return mean and standard deviation of pixels, in [0, 1], that published weights were trained with.

    Args:
        weights: as for `locate_weights`.
        model_name: as described.

    Returns:
        None where nothing tells them: of weights of a file, of a run, and of what is no model of images.

    Raises:
        UserError: the file that tells them is damaged.
    """
    library, _, name = model_name.partition("/")
    if library == "transformers" and weights:
        folder = Path(weights.removeprefix(HUB)).expanduser()
        return _of_preprocessor(folder) or _of_preprocessor(Path(name).expanduser())
    if library == "timm" and weights.startswith((PRETRAINED, HUB)):
        from timm.models import get_pretrained_cfg

        cfg = get_pretrained_cfg(name, allow_unregistered=True)
        known = cfg is not None and weights in (PRETRAINED, f"{HUB}{cfg.hf_hub_id}")
        return (tuple(cfg.mean), tuple(cfg.std)) if known else None
    if library == "torchvision" and weights == PRETRAINED:
        return _pixels_of_torchvision(name)
    return None


def _pixels_of_torchvision(name: str) -> tuple[Pixels, Pixels] | None:
    from torchvision import models

    if name in ("googlenet", "inception_v3"):
        # Built for weights they turn ImageNet's normalisation into this one themselves; built without, they do not.
        return HALF
    transforms = models.get_model_weights(name)["DEFAULT"].transforms()
    mean, std = getattr(transforms, "mean", ()), getattr(transforms, "std", ())
    return (tuple(mean), tuple(std)) if mean and std else None


def _of_preprocessor(folder: Path) -> tuple[Pixels, Pixels] | None:
    """Return what the folder of a model of transformers says of its images; None: it says nothing.

    Raises:
        UserError: its file is damaged.
    """
    file = folder / "preprocessor_config.json"
    if not file.is_file():
        return None
    try:
        known = json.loads(file.read_bytes())
        mean, std = known.get("image_mean"), known.get("image_std")
        if not mean or not std or not known.get("do_normalize", True):
            return None
        return _by_channel(mean), _by_channel(std)
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{file} does not say how images are normalised ({error})") from error


def _by_channel(numbers: float | list[float]) -> Pixels:
    """Return a number for each channel; one alone is that of all three."""
    return tuple(map(float, numbers)) if isinstance(numbers, list) else (float(numbers),) * 3


def _of_timm(name: str, brings: bool) -> Path:
    from timm.models import get_pretrained_cfg

    cfg = get_pretrained_cfg(name, allow_unregistered=True)
    if cfg is None or not cfg.has_weights:
        raise UserError(f"--weights pretrained: timm has no pretrained weights for {name}")
    if cfg.file:
        return Path(cfg.file)
    if cfg.hf_hub_id:
        return _hub_file(str(cfg.hf_hub_id), (cfg.hf_hub_filename,) if cfg.hf_hub_filename else FILES, brings)
    return _of_url(cfg.url, brings)


def _of_torchvision(name: str, brings: bool) -> Path:
    from torchvision import models

    try:
        known = models.get_model_weights(name)
    except ValueError as error:
        raise UserError(f"--weights pretrained: {str(error).splitlines()[0]}") from error
    if not len(known):
        raise UserError(f"--weights pretrained: torchvision has no pretrained weights for {name}")
    return _of_url(known["DEFAULT"].url, brings)


def _of_url(url: str, brings: bool) -> Path:
    import torch

    file = Path(torch.hub.get_dir()) / "checkpoints" / Path(urlparse(url).path).name
    if not file.exists():
        if not brings or not _reaches(url):
            raise _missing(file.name, file.parent, f"put {url} there")
        file.parent.mkdir(parents=True, exist_ok=True)
        _bring(lambda: torch.hub.download_url_to_file(url, str(file)), file.name, file.parent)
    return file


def _hub_file(repository: str, names: tuple[str, ...], brings: bool) -> Path:
    from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError

    found = [try_to_load_from_cache(repository, name) for name in names]
    there = [Path(path) for path in found if isinstance(path, str)]
    if there:
        return there[0]
    cache = Path(constants.HF_HUB_CACHE)
    if not brings or constants.HF_HUB_OFFLINE or not _reaches(constants.ENDPOINT):
        raise _missing(
            repository, cache, f"bring it with `hf download {repository} {names[0]}` where there is a network"
        )

    def first_there() -> str:
        """Download the first file that the repository has."""
        for name in names[:-1]:
            with suppress(EntryNotFoundError):
                return hf_hub_download(repository, name)
        return hf_hub_download(repository, names[-1])

    return Path(_bring(first_there, repository, cache))


def _of_hub(name: str, brings: bool) -> Path:
    try:
        from huggingface_hub import constants, snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
    except ImportError:
        raise UserError(f"--weights hf:{name} needs huggingface_hub: pip install huggingface_hub") from None
    cache = Path(constants.HF_HUB_CACHE)
    try:
        found = Path(snapshot_download(name, local_files_only=True, allow_patterns=list(OF_WEIGHTS)))
        if any(file for pattern in OF_WEIGHTS for file in found.glob(pattern)):  # else of its tokeniser alone
            return found
    except HFValidationError:
        raise UserError(f"--weights hf:{name}: there is no such folder, and it is no name of the hub") from None
    except LocalEntryNotFoundError:
        pass
    if not brings or constants.HF_HUB_OFFLINE or not _reaches(constants.ENDPOINT):
        raise _missing(name, cache, f"bring it with `hf download {name}` where there is a network")
    return Path(_bring(lambda: str(snapshot_download(name, allow_patterns=list(OF_WEIGHTS))), name, cache))


def _bring(download: Callable[[], T], name: str, folder: Path) -> T:
    from huggingface_hub.errors import EntryNotFoundError

    try:
        return download()
    except (OSError, RuntimeError, ValueError, EntryNotFoundError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0][:120]
        raise UserError(f"--weights: {name} is not in {folder}, and could not be downloaded ({reason})") from error


def _reaches(url: str) -> bool:
    """Whether the host of an address answers within a few seconds; true where a proxy would have to be asked."""
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return True
    address = urlparse(url)
    try:
        with socket.create_connection((address.hostname or "", address.port or 443), REACHED_WITHIN_S):
            return True
    except OSError:
        return False


def _missing(name: str, folder: Path, fix: str) -> UserError:
    return UserError(f"--weights: {name} is not in {folder}, and nothing can be downloaded here: {fix}")
