"""Names of models, those of timm and torchvision read from their files: a mistake is said before these are imported."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from echelon.core.errors import UserError, nearest, unknown
from echelon.core.own import TRANSFORMERS

BUILTIN_FOLDER = Path(__file__).parents[1] / "models" / "builtin"
_FOLDERS = {"timm": ("models/**",), "torchvision": ("models", "models/segmentation")}
_REGISTERED = re.compile(
    r"^@register_model(?:\((?:name=)?(?:[\"'](\w+)[\"'])?\))?\n(?:[@ )].*\n)*def (\w+)", re.MULTILINE
)
_LEAST = 3  # letters of a name that others begin with
_FORMS = ("timm/NAME", "torchvision/NAME", "module:function")

OF_SEQUENCES = ("small_bert", "small_ctc", "small_gpt", "small_seq2seq", "speech_cnn", "text_classifier")
"""Built-in models that are not of images."""
OF_COLUMNS = ("dlrm", "matrix_factorisation", "table_mlp", "two_tower")
"""Likewise."""
OF_PIXELS = ("small_unet",)
"""Built-in models of images with a class for each pixel."""

NamesOf = Callable[[], Mapping[str, Sequence[str]]]  # by library


def of_images(builtin: Iterable[str]) -> list[str]:
    """Return the built-in models of images of one class each."""
    return sorted(set(builtin).difference(OF_SEQUENCES, OF_COLUMNS, OF_PIXELS))


def check_model_name(name: str) -> None:
    """Refuse a name that neither Echelon's models have nor the files of timm and torchvision, without importing these.

    Raises:
        UserError: with the nearest name.
    """
    builtin = [file.stem for file in BUILTIN_FOLDER.glob("[!_]*.py")]
    if ":" in name or name.startswith(TRANSFORMERS) or name in (*builtin, "auto"):
        return
    library, _, rest = name.partition("/")
    if library not in _FOLDERS:
        raise unknown_model(name, of_images(builtin), names_in_files)
    known = names_in_files()[library]
    if not known or rest.partition(".")[0] in known or _is_mentioned(library, rest.partition(".")[0]):
        return  # behind a dot timm has a name of weights; what files mention may be an older name
    raise unknown_of_library(library, rest, known)


def library_of(name: str) -> str:
    """Return the library that a model comes from; empty: it is built in, or the user's own.

    >>> library_of("timm/resnet50"), library_of("small_cnn")
    ('timm', '')
    """
    library = name.partition("/")[0]
    return library if "/" in name and library in _FOLDERS else ""


def unknown_model(name: str, builtin: Sequence[str], libraries: NamesOf) -> UserError:
    """Build the refusal of a name that leads to no model: the nearest one, then what exists.

    Args:
        libraries: called where the built-in names are not near.
    """
    known = [*builtin, "auto"]
    library, _, rest = name.rpartition("/")
    if library:
        return UserError(
            f"unknown model {name!r}: {nearest(library, ['timm', 'torchvision', 'transformers'])}"
            f"write timm/{rest}, torchvision/{rest}, transformers/FOLDER, module:function or one of {', '.join(known)}"
        )
    names = libraries()
    if found := [f"{prefix}/{name}" for prefix, theirs in names.items() if name in theirs]:
        return UserError(f"unknown model {name!r}: did you mean {' or '.join(found)}?")
    if nearest(name, known):
        return unknown("model", name, [*known, *_FORMS])
    if longer := _longer(name, builtin, names):
        meant = ", ".join(longer[:-1]) + " or " * (len(longer) > 1) + longer[-1]
        return UserError(f"unknown model {name!r}: did you mean {meant}? built-in: {', '.join(known)}")
    anywhere = {each: f"{prefix}/{each}" for prefix, theirs in reversed(list(names.items())) for each in theirs}
    closest = nearest(name, anywhere).removeprefix("did you mean ").removesuffix("? ")
    if closest:
        return UserError(f"unknown model {name!r}: did you mean {anywhere[closest]}? built-in: {', '.join(known)}")
    return unknown("model", name, [*known, *_FORMS], may_be_object=True)


def unknown_of_library(library: str, name: str, known: Sequence[str]) -> UserError:
    """Build the refusal of `LIBRARY/NAME`."""
    hint = f"{nearest(name, known)}{library} has {len(known)}: see {library}'s list_models()"
    return UserError(f"unknown model '{library}/{name}': {hint}")


def _longer(name: str, builtin: Sequence[str], libraries: Mapping[str, Sequence[str]]) -> list[str]:
    """Return built-in models whose name has a word in it, and of each library the shortest that begins with it."""
    if len(name) < _LEAST:
        return []
    begun = {prefix: [each for each in names if each.startswith(name.lower())] for prefix, names in libraries.items()}
    found = [f"{prefix}/{min(names, key=len)}" for prefix, names in begun.items() if names]
    return [*(each for each in builtin if name.lower() in each.split("_")), *found]


@lru_cache(maxsize=1)
def names_in_files() -> Mapping[str, Sequence[str]]:
    """Return the models that timm and torchvision register in their files; none where these cannot be read."""
    return {library: sorted({n for text in _texts(library) for n in _registered(text)}) for library in _FOLDERS}


def _registered(text: str) -> set[str]:
    return {given or function for given, function in _REGISTERED.findall(text)}


def _is_mentioned(library: str, name: str) -> bool:
    quoted = (f"'{name}'", f'"{name}"')
    return any(each in text for text in _texts(library) for each in quoted)


@lru_cache(maxsize=2)
def _texts(library: str) -> Sequence[str]:
    spec = importlib.util.find_spec(library)  # of a package itself: nothing is imported
    places = [Path(place) for place in (spec.submodule_search_locations or ())] if spec else []
    files = [file for place in places for folder in _FOLDERS[library] for file in place.glob(f"{folder}/*.py")]
    return [file.read_text(encoding="utf-8", errors="replace") for file in files]
