"""The files of a table: a csv, jsonl or parquet file, or one for each part, of which only wanted columns are read.

`TableParts` are all files of a source, `TablePart` is one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv as arrow_csv
from pyarrow import json as arrow_json
from pyarrow import parquet

from echelon.config import DataConfig
from echelon.core.errors import UserError, nearest
from echelon.data.base import DataRequest
from echelon.data.class_folders import FolderLinks
from echelon.data.column_numbers import is_string, stray
from echelon.data.columns import Form, MeasuredColumns, form_of
from echelon.data.file_names import TABLES
from echelon.data.kept_info import read_info
from echelon.data.order import Indices
from echelon.data.parts import TEST, TRAIN, VALIDATION, by_part, part_of, part_of_file

_PANDAS_INDEX = re.compile(r"__index_level_\d+__")  # says where a row stood, nothing of what it is
_CSV_INDEX = re.compile(r"\s*|Unnamed: \d+")  # likewise: `to_csv` gives it no name, and a second time that of pandas
_SPLIT_NAMES = ("split", "set", "part", "subset", "fold")
NO_SPLIT = "none"
"""As `--split`: no column divides the rows."""
_LISTED_VALUES = 5


def is_folder_of_tables(path: Path) -> bool:
    """Whether a folder holds `train.csv` or the like."""
    return any(part_of_file(name) == TRAIN for name in _tables_in(path))


def _tables_in(path: Path) -> list[str]:
    if not path.is_dir():
        return []
    return [file.name for file in path.iterdir() if file.suffix.lower() in TABLES and file.is_file()]


@dataclass(frozen=True)
class TableParts:
    """The files of a table: of training, of validation where there is one, and of a test set.

    Attributes:
        source: as the user wrote it, for messages.
        notes: what a user has to know of links that lead elsewhere, and of the column that divides the rows.
        split: name of that column, which is no input; empty: there is none.
        rows: of one file that a column divides, the places of each part's rows; empty: each file is a part.
    """

    source: str
    files: tuple[TablePart, ...]
    has_validation: bool
    has_test: bool
    notes: tuple[str, ...] = ()
    split: str = ""
    rows: tuple[Indices, ...] = ()

    @classmethod
    def of(cls, request: DataRequest) -> TableParts:
        """Open the files that a description names.

        Raises:
            UserError: one cannot be read, a link leads out of the folder, or `--split` names no column of parts.
        """
        path = request.path
        names = by_part(request.config.source, _tables_in(path), part_of_file) or {TRAIN: ""}
        paths = [path / name for name in names.values()]
        links = FolderLinks(path, request.config.follow_links)
        links.count(paths)
        links.check()
        strings = MeasuredColumns(request.folder, request.config.measures).strings
        files = tuple(TablePart.of(file, strings) for file in paths)
        parts = cls(request.config.source, files, VALIDATION in names, TEST in names, links.notes)
        return parts._divided(request)

    @classmethod
    def of_tables(cls, request: DataRequest, tables: Mapping[str, pa.Table]) -> TableParts:
        """Return tables that are read already, by the names of their parts, in place of files."""
        source = request.config.source
        files = [
            TablePart(Path(f"{source}, part {name}"), tuple(tables[name].column_names), tables[name])
            for name in (TRAIN, VALIDATION, TEST)
            if name in tables
        ]
        return cls(source, tuple(files), VALIDATION in tables, TEST in tables)._divided(request)

    def _divided(self, request: DataRequest) -> TableParts:
        """Return the parts into which a column divides one table's rows, where it has one; several files are parts.

        A run that began with such a column as an input goes on so.

        Raises:
            UserError: `--split` names none, or beside files that are parts; or two columns could be meant.
        """
        config, measured = request.config, MeasuredColumns(request.folder)
        if config.split == NO_SPLIT:
            return self
        is_other = request.tell_whole is not None
        if config.split and is_other and (len(self.files) > 1 or config.split not in self.files[0].names):
            return replace(self, split=config.split)  # the run's column, which this data does without
        if config.split:
            self._check_split(config)
            return self._divided_by(config.split, config.split, is_other)
        names = [name for name in self.files[0].names if name.lower() in _SPLIT_NAMES]
        used = {*listed(config.input), *listed(config.target)}
        columns, notes = [], list(self.notes)
        for name in names:
            is_input = name in used or measured.form(name) is not None
            if is_input or any(name not in file.names for file in self.files):
                continue
            others = _no_parts(self.read((name,))[name])
            if others is not None and not others:
                columns.append(name)
            elif others:
                notes.append(f"column {name} is an input: it names parts, but also {', '.join(others)}")
        if len(columns) > 1:
            raise UserError(
                f"data {self.source}: the columns {' and '.join(columns)} both name parts: choose one with --split, "
                f"and leave out the other with --input, or use --split {NO_SPLIT}"
            )
        parts = replace(self, notes=tuple(notes))
        return parts._divided_by(columns[0], is_other=is_other) if columns else parts

    def _check_split(self, config: DataConfig) -> None:
        where = f"data {self.source}: --split {config.split}"
        if config.split in (*listed(config.input), *listed(config.target)):
            raise UserError(f"{where}: it is an input or the target too: name it once")
        if len(self.files) > 1:
            files = ", ".join(file.path.name for file in self.files)
            raise UserError(f"{where}: {files} are its parts already: leave out --split")
        check_known(self.files[0].names, (config.split,), self.files[0].path)
        others = _no_parts(self.files[0].read((config.split,))[config.split])
        if others is None or others:
            shown = ", ".join(others) if others else "no strings"
            raise UserError(f"{where}: it holds {shown}; values are names of parts: train, val, test")

    def _divided_by(self, column: str, wanted: str = "", is_other: bool = False) -> TableParts:
        """Return the parts by a column of their names.

        Args:
            wanted: the column, where the user named it.
            is_other: these are not a run's own rows, and nothing is trained on them.

        Raises:
            UserError: the user did, and no row is for training.
        """
        take = f"--split {NO_SPLIT} makes it one"
        if len(self.files) > 1:
            note = f"column {column} is no input, as it names the parts that the files are ({take})"
            return replace(self, split=column, notes=(*self.notes, note))
        part_of_row = np.array([part_of(value) for value in self.files[0].read((column,))[column].to_pylist()])
        rows = {part: np.flatnonzero(part_of_row == part) for part in (TRAIN, VALIDATION, TEST)}
        there = {part: each for part, each in rows.items() if len(each)}
        told = ", ".join(f"{len(each):,} {part}" for part, each in there.items())
        if is_other and TRAIN not in there:
            there = {TRAIN: next(reversed(there.values())), **there}
        if TRAIN not in there:
            if wanted:
                raise UserError(f"data {self.source}: --split {column}: no row is for training, but {told}")
            note = f"column {column} is no input, as it names parts ({take}); it divides nothing: {told}"
            return replace(self, split=column, notes=(*self.notes, note))
        note = f"column {column} divides the rows, {told}, and is no input ({take})"
        return replace(
            self,
            has_validation=VALIDATION in there,
            has_test=TEST in there,
            notes=(*self.notes, note),
            split=column,
            rows=tuple(there.values()),
        )

    def columns(self, request: DataRequest) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the names of inputs and targets; all files have them.

        Raises:
            UserError: one lacks a column, or no target is named.
        """
        names = [name for name in self.files[0].names if name != self.split]
        inputs, targets = _columns(request, names, self.files[0].path)
        for file in self.files:
            check_known(file.names, (*inputs, *targets), file.path)
        return inputs, targets

    def each(self, columns: Sequence[str]) -> list[pa.Table]:
        """Read columns of each part."""
        tables = [file.read(columns) for file in self.files]
        return [tables[0].take(pa.array(rows)) for rows in self.rows] if self.rows else tables

    def places(self, part: int, rows: Indices) -> Indices:
        """Return where rows of a part stand in its file."""
        return self.rows[part][rows] if self.rows else rows

    def read(self, columns: Sequence[str]) -> pa.Table:
        """Read columns of all files as one table."""
        return self.joined(self.each(columns))

    def joined(self, tables: Sequence[pa.Table]) -> pa.Table:
        """Put the files' tables one after another.

        Raises:
            UserError: a column has two types that are not of one kind.
        """
        try:
            return pa.concat_tables(tables, promote_options="permissive")
        except pa.ArrowException as error:
            differs = _difference(tables) or f"columns of its parts differ in type ({_first_line(error)})"
            raise UserError(f"data {self.source}: {differs}") from error


@dataclass(frozen=True)
class TablePart:
    """One file, its columns known by their names.

    Attributes:
        whole: its rows, where the format has to be read as a whole to know its columns.
        written: names as they stand in the file, where spaces may surround them.
        strings: columns that are read as strings where the format does not say what they hold, as csv does not.
    """

    path: Path
    names: tuple[str, ...]
    whole: pa.Table | None = None
    written: Mapping[str, str] = field(default_factory=dict)
    strings: tuple[str, ...] = ()

    @classmethod
    def of(cls, path: Path, strings: Sequence[str] = ()) -> TablePart:
        """Read the names of the columns.

        Raises:
            UserError: it is not there, empty, or not of its format.
        """
        whole = None
        with _refused(path):
            if path.suffix.lower() == ".parquet":
                names = [name for name in parquet.read_schema(path).names if not _PANDAS_INDEX.fullmatch(name)]
            elif path.suffix.lower() == ".jsonl":
                whole = arrow_json.read_json(path)
                names = whole.column_names
            else:
                with arrow_csv.open_csv(path, **_csv_options(path)) as stream:
                    names = stream.schema.names
        if names.count("") > 1:  # as of an index of several levels, or commas at the end: nobody can ask for one
            names = [name for name in names if name]
        stripped = tuple(name.strip() for name in names)  # as in a head of `a, b`
        if len(set(stripped)) < len(names):
            raise UserError(f"data {path}: two columns have the same name")
        return cls(path, stripped, whole, dict(zip(stripped, names, strict=True)), tuple(strings))

    def read(self, columns: Sequence[str]) -> pa.Table:
        """Read some columns.

        Raises:
            UserError: it has no rows, or is not of its format.
        """
        written = [self.written.get(name, name) for name in columns]
        strings = [self.written.get(name, name) for name in self.strings]
        with _refused(self.path):
            if self.whole is not None:
                table = self.whole.select(written)
            elif self.path.suffix.lower() == ".parquet":
                table = parquet.read_table(self.path, columns=written)
            else:
                table = arrow_csv.read_csv(self.path, **_csv_options(self.path, written, strings))
            table = table.rename_columns(list(columns))
        if not len(table):
            raise UserError(f"data {self.path}: it has no rows")
        return self._plain(table)

    def _plain(self, table: pa.Table) -> pa.Table:
        """Return the columns with their values.

        Raises:
            UserError: texts of a file are no UTF-8.
        """
        for name in table.column_names:
            if pa.types.is_binary(table[name].type) and self.path.suffix.lower() in (".csv", ".tsv"):
                raise UserError(f"data {self.path}: column {name} holds text that is not UTF-8: save the file as UTF-8")
        return without_dictionaries(table)


def without_dictionaries(table: pa.Table) -> pa.Table:
    """Return a table whose columns hold their values, not places in a dictionary of them as pandas' categories do."""
    for place, name in enumerate(table.column_names):
        kind = table[name].type
        if pa.types.is_dictionary(kind):
            table = table.set_column(place, name, table[name].cast(kind.value_type))
    return table


def read_rows(path: Path, strings: Sequence[str] = ()) -> pa.Table:
    """Return all columns of a table's file.

    Args:
        strings: columns that are read as strings where the format does not say what they hold, as csv does not.

    Raises:
        UserError: it is not there, empty, or not of its format.
    """
    file = TablePart.of(path, strings)
    return file.read(file.names)


def _difference(tables: Sequence[pa.Table]) -> str:
    """Say which column holds strings in one file and numbers in another, with the first that is none; else nothing."""
    for name in tables[0].column_names:
        columns = [table[name] for table in tables]
        strings = [values for values in columns if is_string(values)]
        if strings and any(form_of(values) is Form.NUMBERS for values in columns):
            return f"column {name} holds numbers in one of its files, and strings in another{stray(strings[0])}"
    return ""


def _no_parts(values: pa.ChunkedArray) -> list[str] | None:
    """Return some values of a column that are no names of parts; None: it holds no strings, or no such name at all."""
    if not is_string(values):
        return None
    different = pc.unique(values).to_pylist()
    others = ["an empty value" if value is None else repr(value) for value in different if not part_of(value or "")]
    return others[:_LISTED_VALUES] if len(others) < len(different) else None


def _columns(request: DataRequest, names: Sequence[str], file: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of inputs and targets, as they are described."""
    wanted, target = (listed(text) for text in (request.config.input, request.config.target))
    if not target and request.tell_whole is not None:  # a command that evaluates takes no names of columns
        raise UserError(
            f"data {request.config.source} is a table, and the run's data is none: it names no column to predict"
        )
    if not target:
        raise UserError(f"data {request.config.source}: name the column to predict with --target: {', '.join(names)}")
    check_known(names, (*wanted, *target), file)
    inputs = wanted or tuple(name for name in names if name not in target and not says_where(request, name))
    if not inputs or set(inputs) & set(target):
        both = next(iter(set(inputs) & set(target)), "")
        reason = f"{both} is both input and target" if both else "no column is left for the input"
        raise UserError(f"data {request.config.source}: {reason}")
    return inputs, target


def says_where(request: DataRequest, name: str) -> bool:
    """Whether a column says where a row stood, and nothing of what it is; not one that the run has begun with."""
    if not _CSV_INDEX.fullmatch(name):
        return False
    known = read_info(request.folder) if request.folder is not None else None
    return known is None or name not in known.columns


def listed(text: str) -> tuple[str, ...]:
    """Return the names in a text that are divided by commas, each once."""
    return tuple(dict.fromkeys(name for part in text.split(",") if (name := part.strip())))


def check_known(names: Sequence[str], wanted: Sequence[str], file: Path) -> None:
    """Refuse names of columns that a file does not have.

    Raises:
        UserError: names the first, and the nearest that there is.
    """
    for name in wanted:
        if name not in names:
            raise UserError(f"data {file}: no column {name!r}: {nearest(name, names)}it has {', '.join(names)}")


@contextmanager
def _refused(file: Path) -> Iterator[None]:
    """Say of a file in one line why it cannot be read."""
    try:
        yield
    except OSError as error:
        raise UserError(f"data {file}: cannot be read ({_first_line(error)})") from error
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise UserError(f"data {file}: cannot be read as {file.suffix[1:].lower()} ({_first_line(error)})") from error


def _csv_options(file: Path, columns: Sequence[str] = (), strings: Sequence[str] = ()) -> dict[str, object]:
    """Return how a CSV file is read: its delimiter by its first line, and of the columns those named, else all.

    Args:
        strings: columns whose values are strings, whatever they look like.
    """
    with file.open("rb") as stream:
        head = stream.readline()
    others = [mark for mark in (";", "|") if mark.encode() in head and b"," not in head]
    delimiter = "\t" if file.suffix.lower() == ".tsv" else next(iter(others), ",")
    return {
        "parse_options": arrow_csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
        "convert_options": arrow_csv.ConvertOptions(
            strings_can_be_null=True,
            include_columns=list(columns),
            column_types=dict.fromkeys(strings, pa.string()),
        ),
    }


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
