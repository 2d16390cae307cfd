"""New samples as a run's model takes them: files, texts, rows of a table or arrays, through the run's own steps.

What these steps were measured on (means, categories, a tokeniser) is what the run keeps.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from echelon.core.errors import UserError, nearest
from echelon.data.base import Source
from echelon.data.class_folders import IMAGE_FILES, SOUND_FILES, FileKind, FolderLinks, files_below
from echelon.data.columns import MOST_TOKENS, MeasuredColumns, inputs_of_rows, with_mask
from echelon.data.file_names import TABLES
from echelon.data.images import ImageArray, ImageFiles, TensorArray
from echelon.data.labelled_files import FileNames, LabelledFiles
from echelon.data.masks import ImagesToMask
from echelon.data.sound_features import open_features
from echelon.data.sounds import measured as measured_sounds
from echelon.data.sources.text_file import SUFFIXES as TEXTS
from echelon.data.sources.text_file import lines_of, read_lines, read_text
from echelon.data.sources.texts import TEXT_FILES
from echelon.data.table_files import read_rows, without_dictionaries
from echelon.data.tokenisers import Ids, Tokeniser
from echelon.inference import Address, Lines, Text
from echelon.inference.at_urls import BroughtFiles
from echelon.run.machine import say
from echelon.run.trained import TrainedModel
from echelon.storage.url import is_url
from echelon.tasks import nest
from echelon.tasks.base import Encoding
from echelon.tasks.nest import Nest, TensorSpec

MASK_TOKEN = "[MASK]"
"""What stands in a text where a masked language model is to say what belongs there."""
_CHANNELS = (1, 3)  # of images


class SampleKind(StrEnum):
    """What the samples of a run are; texts may be a column of a table."""

    SOUNDS, IMAGES, TEXTS, ROWS, ARRAYS = "sounds", "images", "texts", "rows", "arrays"


@dataclass(frozen=True)
class Samples:
    """Samples without targets.

    Attributes:
        names: of each: its file, its text, or the number of its row, from 1.
        source: whose evaluation set they are; targets count nothing.
        files: that they are, one each; empty: they are none.
    """

    names: Sequence[str | int]
    source: Source
    files: Sequence[str] = ()


def samples_of(trained: TrainedModel, data: Any) -> Samples:
    """Return samples by what the run was trained on.

    Args:
        data: paths or URLs of files or folders, texts, a table (of pyarrow or pandas, or rows as mappings), or arrays.

    Raises:
        UserError: there is none, or the model takes others: says which.
    """
    is_nest = isinstance(data, Mapping) and kind_of(trained) is SampleKind.ARRAYS  # of inputs by name
    raw = [data] if isinstance(data, (str, Path, Mapping)) and not is_nest else data
    if isinstance(raw, Sequence) and not len(raw):
        raise UserError("there is nothing to predict: name files, or give texts with --text")
    if not (_are_strings(raw) and any(_is_address(trained, each) for each in raw)):
        return _samples_of(trained, raw)
    urls = [str(each) for each in raw if _is_address(trained, each)]
    brought = BroughtFiles.of(urls, _endings(trained), trained.config.data)
    here = [brought.paths[str(each)] if _is_address(trained, each) else each for each in raw]
    samples = _samples_of(trained, here)
    return replace(samples, names=[brought.name_at_url(name) for name in samples.names])


def _is_address(trained: TrainedModel, each: Any) -> bool:
    """Whether this is a URL of files; a text may be one that only speaks of a URL."""
    if isinstance(each, Address):
        return True
    if isinstance(each, Text | Path) or not is_url(each):
        return False
    return kind_of(trained) is not SampleKind.TEXTS or _names_file(each)


def _endings(trained: TrainedModel) -> tuple[str, ...]:
    """Return how the names of files end that a run's samples may be in."""
    match kind_of(trained):
        case SampleKind.SOUNDS:
            return SOUND_FILES.extensions
        case SampleKind.IMAGES:
            return IMAGE_FILES.extensions
        case SampleKind.ROWS:
            return TABLES
        case SampleKind.TEXTS:
            return (*TEXTS, *TABLES) if trained.info.columns else TEXTS
    return ()


def _samples_of(trained: TrainedModel, raw: Any) -> Samples:
    follow, columns = trained.config.data.follow_links, trained.info.columns
    match kind_of(trained):
        case SampleKind.SOUNDS:
            return _sounds(trained, _files(raw, SOUND_FILES, "sounds", follow))
        case SampleKind.ROWS:
            measured = MeasuredColumns(trained.folder)
            return _rows(trained, _table(raw, columns, measured.strings), measured)
        case SampleKind.TEXTS if trained.task.encoding.judges_text and not columns:
            return _documents(trained, raw)
        case SampleKind.TEXTS:
            return _texts(trained, _lines(raw, columns, trained.task.encoding.judges_text))
        case SampleKind.IMAGES if _are_strings(raw):
            return _images(trained, _files(raw, IMAGE_FILES, "images", follow))
    return _arrays(trained, raw)


def kind_of(trained: TrainedModel) -> SampleKind:
    """Return what a run's samples are."""
    info = trained.info
    if info.rate:
        return SampleKind.SOUNDS
    if info.tokeniser is not None:
        return SampleKind.TEXTS
    if info.columns:
        return SampleKind.ROWS
    return SampleKind.IMAGES if info.mean else SampleKind.ARRAYS


def _sample_source(trained: TrainedModel, dataset: Any) -> Source:
    return Source(dataset, dataset, trained.info)


def _blank_targets(count: int) -> NDArray[np.int64]:
    return np.zeros(count, np.int64)


def _are_strings(raw: Any) -> bool:
    return isinstance(raw, Sequence) and all(isinstance(each, (str, Path)) for each in raw)


def _are_paths(raw: Any) -> bool:
    return _are_strings(raw) and not any(isinstance(each, Text) for each in raw)


def _files(raw: Any, kind: FileKind, what: str, follow: bool) -> list[str]:
    """Return files of a kind, those of folders among them, in the order of their names.

    Args:
        what: they are called.
        follow: links that lead out of a folder.

    Raises:
        UserError: there are none, or links lead in a circle or out of a folder.
    """
    if not _are_paths(raw):
        raise UserError(f"this run's samples are {what}: give paths of files or folders")
    files: list[str] = []
    for each in raw:
        path = Path(each).expanduser()
        if path.is_dir():
            files += _below(path, kind, follow)
        elif path.is_file():
            files.append(str(path))
        else:
            raise UserError(f"{path}: no such file; this run's samples are {what}")
    return files


def _below(folder: Path, kind: FileKind, follow: bool) -> list[str]:
    links = FolderLinks(folder, follow, kind)
    try:
        inside = [str(folder / name) for name in files_below(folder, "", links, ())]
    except OSError as error:
        raise UserError(f"data {error.filename}: {error.strerror}") from None
    links.check()
    if not inside:
        raise UserError(f"{folder}: there are no {kind.plural} in this folder")
    for note in links.notes:
        say(note)
    return inside


def _labelled(files: Sequence[str]) -> LabelledFiles:
    return LabelledFiles("", FileNames(files), _blank_targets(len(files)))


def _images(trained: TrainedModel, files: list[str]) -> Samples:
    images = ImageFiles.of(_labelled(files))
    masks = trained.task.encoding is Encoding.MASKS
    return Samples(files, _sample_source(trained, ImagesToMask.of(images) if masks else images), files)


def _sounds(trained: TrainedModel, files: list[str]) -> Samples:
    features = open_features(trained.features)
    sounds = measured_sounds(_labelled(files), features, trained.info.rate, keeps_unreadable=True)
    return Samples(files, _sample_source(trained, sounds), files)


def _table(raw: Any, columns: Sequence[str], strings: Sequence[str] = ()) -> pa.Table:
    """Return rows as a table.

    Args:
        strings: columns that hold strings, whatever those of a csv file look like.

    Raises:
        UserError: these are no rows.
    """
    wanted = f"this run's samples are rows of a table with {', '.join(columns)}"
    if isinstance(raw, pa.Table):
        return without_dictionaries(raw)
    if hasattr(raw, "columns") and hasattr(raw, "iloc"):
        try:
            return without_dictionaries(pa.Table.from_pandas(raw, preserve_index=False))
        except (pa.ArrowException, TypeError, ValueError, OverflowError):  # a column of several types
            return _table_of_mappings(raw.to_dict("records"), columns)
    if not isinstance(raw, Sequence):
        raise UserError(f"{wanted}: give files ({', '.join(TABLES)}), mappings, or a data frame")
    if all(isinstance(each, Mapping) for each in raw):
        return _table_of_mappings(raw, columns)
    if not _are_paths(raw) or not all(str(each).lower().endswith(TABLES) for each in raw):
        raise UserError(f"{wanted}: give files that end in {', '.join(TABLES)}")
    tables = [_with_columns(Path(each).expanduser(), columns, strings) for each in raw]
    try:
        return pa.concat_tables(tables, promote_options="permissive")
    except pa.ArrowException as error:
        raise UserError(f"the tables differ in their columns ({str(error).splitlines()[0]})") from error


def _with_columns(file: Path, columns: Sequence[str], strings: Sequence[str]) -> pa.Table:
    table = read_rows(file, strings)
    for name in columns:
        if name not in table.column_names:
            raise UserError(f"{file}: no column {name!r}: {nearest(name, table.column_names)}it has "
                            f"{', '.join(table.column_names)}")  # fmt: skip
    return table


def _table_of_mappings(rows: Sequence[Mapping[str, Any]], wanted: Sequence[str]) -> pa.Table:
    """Return rows as a table of all columns that any of them has; a value that a row lacks is missing.

    Columns that are not wanted are left empty, whatever they hold.

    A column of strings and numbers, as clients of a service send them, is one of strings: where it is to be a number,
    its strings are read as numbers later.

    Raises:
        UserError: a value is no number and no string, or none that a table can hold: names row and column.
    """
    names = dict.fromkeys(str(name) for row in rows for name in row)
    columns = {}
    for name in names:
        if name not in wanted:
            columns[name] = pa.nulls(len(rows))
            continue
        values = [row.get(name) for row in rows]
        try:
            column = pa.array(values, from_pandas=True)
        except (pa.ArrowException, TypeError, ValueError, OverflowError):
            column = None
        plain = column is not None and not pa.types.is_nested(column.type)
        columns[name] = column if plain else _strings(name, values)
    return pa.table(columns)


def _strings(name: str, values: Sequence[Any]) -> pa.Array:
    texts: list[str | None] = []
    for i, value in enumerate(values, 1):
        if value is not None and not isinstance(value, str | int | float):
            raise UserError(f"row {i}: column {name} has {value!r:.60}, which is no number and no string")
        texts.append(None if value is None else str(value))
        _check_unicode(f"row {i}: column {name}", texts[-1] or "")
    return pa.array(texts, pa.string())


def _check_unicode(what: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{what} is no Unicode text: its character {error.start + 1} is half of a pair") from error


def _rows(trained: TrainedModel, table: pa.Table, measured: MeasuredColumns) -> Samples:
    inputs = inputs_of_rows(table, trained.info, measured)
    array = TensorArray(inputs, _blank_targets(len(table)))
    return Samples(range(1, len(table) + 1), _sample_source(trained, array))


def _lines(raw: Any, columns: Sequence[str], keep_empty: bool) -> list[str]:
    """Return texts: those handed over, the lines of files, or a column of tables.

    Args:
        keep_empty: lines, which are texts like others where a class is asked for; else they are left out.

    Raises:
        UserError: these are none.
    """
    if not _are_strings(raw):
        if not columns:
            raise UserError("this run's samples are texts: give strings, or files with one text a line (.txt)")
        table = _table(raw, columns)
        return _column(table, columns[0])
    texts: list[str] = []
    for each in raw:
        path = Path(each).expanduser() if _names_file(each) else None
        if isinstance(each, Lines):
            texts += [line for line in lines_of(each) if keep_empty or line.strip()]
        elif path is None:
            texts.append(str(each))
        elif path.suffix.lower() in TABLES and columns:
            texts += _column(read_rows(path, columns[:1]), columns[0])
        else:
            texts += _lines_of(path, keep_empty)
    return texts


def _names_file(text: str | Path) -> bool:
    """Whether a text is the name of a file of texts or of rows."""
    if isinstance(text, Text | Path):
        return isinstance(text, Path)
    return len(text) < 1000 and text.lower().endswith((*TEXTS, *TABLES)) and "\n" not in text


def _column(table: pa.Table, name: str) -> list[str]:
    if name not in table.column_names:
        raise UserError(f"no column {name!r}: there are {', '.join(table.column_names)}")
    return ["" if value is None else str(value) for value in table[name].to_pylist()]


def _lines_of(path: Path, keep_empty: bool) -> list[str]:
    return [line for line in read_lines(path) if keep_empty or line.strip()]


def _documents(trained: TrainedModel, raw: Any) -> Samples:
    """Return whole files as texts, as the run's own were, and texts that are handed over."""
    if not _are_strings(raw):
        raise UserError("this run's samples are text files: give paths of files or folders, or texts")
    names: list[str] = []
    texts: list[str] = []
    follow = trained.config.data.follow_links
    for each in raw:
        is_path = not isinstance(each, Text) and (_names_file(each) or os.path.isdir(each))  # noqa: PTH112 (a text may be no path at all)
        files = _files([each], TEXT_FILES, TEXT_FILES.plural, follow) if is_path else []
        names += files or [str(each)]
        texts += [read_text(Path(file)) for file in files] or [str(each)]
    return _texts(trained, texts, names)


def _texts(trained: TrainedModel, texts: list[str], names: Sequence[str] = ()) -> Samples:
    """Return texts, which are called by themselves where they have no names."""
    for i, text in enumerate(texts, 1):
        _check_unicode(f"text {i}", text)
    if not texts:
        raise UserError("there is nothing to predict: the files hold no text")
    tokeniser: Any = trained.info.tokeniser
    rows = _encoder(trained, tokeniser)(texts)
    array = TensorArray(with_mask(rows), _blank_targets(len(texts)))
    return Samples(names or texts, _sample_source(trained, array))


def _encoder(trained: TrainedModel, tokeniser: Tokeniser) -> Callable[[Sequence[str]], list[Ids]]:
    """Return what cuts texts as the run's data was cut."""
    marks, encoding = trained.info.marks, trained.task.encoding

    def sentences(texts: Sequence[str]) -> list[Ids]:
        """Return the ids of sentences, each with the mark of its end."""
        assert marks is not None
        return [np.append(row[: MOST_TOKENS - 1], marks.end) for row in tokeniser.encode(texts)]

    def masked(texts: Sequence[str]) -> list[Ids]:
        """Return the ids of texts with masks, whose number is the vocabulary's size."""
        gap = np.array([tokeniser.count])
        return [_joined(tokeniser.encode(text.split(MASK_TOKEN)), gap) for text in texts]

    if encoding is Encoding.TEXT_PAIRS:
        return sentences
    if encoding is Encoding.MASKED_TOKENS:
        return masked
    most = MOST_TOKENS if encoding.judges_text else None
    return lambda texts: tokeniser.encode(texts, most)


def _joined(texts: Sequence[Ids], between: Ids) -> Ids:
    pieces = [piece for text in texts for piece in (between, text)][1:]
    return np.concatenate(pieces).astype(np.int64)


def _arrays(trained: TrainedModel, raw: Any) -> Samples:
    """Return arrays or tensors, a nest of them as the model takes it; of images uint8 `(N, C, H, W)`.

    Raises:
        UserError: these are none, or of another shape than the run's.
    """
    specs = trained.info.inputs
    arrays = nest.map_leaves(_array, raw)
    if not nest.leaves(arrays) or any(leaf is None for leaf in nest.leaves(arrays)):
        what = "images" if trained.info.mean else f"arrays: each sample {nest.describe(specs)}"
        raise UserError(f"this run's samples are {what}; give echelon.predict files or arrays of these")
    if trained.info.mean:
        pixels = _pixels(arrays)
        images = ImageArray(pixels, _blank_targets(len(pixels)))
        return Samples(range(1, len(pixels) + 1), _sample_source(trained, images))
    try:
        in_order = nest.leaves_as(specs, arrays)
    except ValueError as error:
        if isinstance(arrays, Mapping):
            raise UserError(f"these are {error}; the run's samples are {nest.describe(specs)}") from None
        in_order = nest.leaves(arrays)  # by place
    _check_shapes(in_order, specs)
    arrays = nest.map_leaves(_as_wanted, nest.rebuild(specs, iter(in_order)), specs)
    count = nest.rows(arrays)
    return Samples(range(1, count + 1), _sample_source(trained, TensorArray(arrays, _blank_targets(count))))


def _pixels(arrays: Nest) -> NDArray[np.uint8]:
    """Return images as one array `(N, C, H, W)`: one that is such already, or a list of images `(C, H, W)`.

    Raises:
        UserError: they are of another shape or type.
    """
    leaves = nest.leaves(arrays)
    shapes = list(dict.fromkeys(each.shape for each in leaves))
    is_list = isinstance(arrays, list | tuple) and len(shapes) == 1 and len(shapes[0]) == 3
    pixels = np.stack(leaves) if is_list else leaves[0]
    wanted = "this run takes images as one array (N, C, H, W), or a list of them (C, H, W) of one shape; C is 1 or 3"
    if (len(leaves) > 1 and not is_list) or pixels.ndim != 4 or pixels.shape[1] not in _CHANNELS:
        is_last = len(shapes[0]) > 2 and shapes[0][-1] in _CHANNELS
        hint = "; channels come last here: transpose them, as with numpy.moveaxis(array, -1, -3)" if is_last else ""
        raise UserError(f"{wanted}; these are of shape {', '.join(map(str, shapes))}{hint}")
    if pixels.dtype != np.uint8:
        raise UserError(f"{wanted}; these are {pixels.dtype}: give pixels from 0 to 255 as uint8")
    return pixels


def _array(leaf: Any) -> NDArray[Any] | None:
    if isinstance(leaf, torch.Tensor):
        leaf = leaf.detach().cpu()
        return (leaf.float() if leaf.dtype is torch.bfloat16 else leaf).numpy()
    return leaf if isinstance(leaf, np.ndarray) and leaf.dtype != object else None


def _as_wanted(leaf: NDArray[Any], spec: TensorSpec) -> NDArray[Any]:
    """Return an array in the type of the run's, where both are floats: numpy's default is another than torch's."""
    both = leaf.dtype.kind == "f" and spec.dtype in ("float16", "float32", "float64")
    return leaf.astype(spec.dtype) if both else leaf


def _check_shapes(arrays: Nest, specs: Nest) -> None:
    raw, wanted = nest.leaves(arrays), nest.leaves(specs)
    shapes = [each.shape[1:] for each in raw]
    if len(raw) != len(wanted) or any(
        not spec.ragged and tuple(shape) != spec.shape for shape, spec in zip(shapes, wanted, strict=True)
    ):
        raise UserError(f"samples are {', '.join(map(str, shapes))}; the run's are {nest.describe(specs)}")
