"""Tables: CSV, JSONL or parquet, one file that is split, or a folder with train.csv and val.csv or test.csv.

Columns of numbers are standardised by the training rows, strings are numbered as categories. What is learnt follows
from the target: a column of floats is regression, few whole numbers or strings are classes, strings such as `red|blue`
or lists are labels. Inputs of one column of texts are cut into tokens, whichever of these is learnt.

Needs: `--target`, the column that is to be predicted; `--input` names the others, where not all are used.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from echelon.core.errors import UserError
from echelon.data.base import CLASS_NUMBER, DataInfo, DataOutline, DataRequest, Source, class_notes
from echelon.data.class_folders import SOUND_FILES, FolderLinks
from echelon.data.column_numbers import as_numbers, is_string, read_strings, stray
from echelon.data.columns import (
    UNSEEN,
    Form,
    InputForms,
    MeasuredColumns,
    Numbered,
    are_marks,
    classes_of,
    count_different,
    encode_texts,
    form_of,
    holds_labels,
    input_forms,
    is_named_id,
    is_whole,
    known_values,
    labels_of_rows,
    marks_of_columns,
    marks_of_lists,
    mean_and_std,
    names_of_marks,
    number_facts,
    numbered,
    standardised,
    table_digest,
)
from echelon.data.file_names import TABLES
from echelon.data.images import TensorArray
from echelon.data.interactions import InteractionColumns, interactions_source, time_among
from echelon.data.ragged import RaggedArray
from echelon.data.sample_index import RowSampleIndex
from echelon.data.sources.base import SourceKind, held_out_of_begun
from echelon.data.sources.transcripts import Recordings, plain_text, transcribed
from echelon.data.table_files import TableParts, check_known, is_folder_of_tables, listed, says_where
from echelon.tasks.base import Encoding
from echelon.tasks.nest import Nest, TensorSpec, map_leaves

_TASKS = {
    Encoding.NUMBERS: "regression",
    Encoding.CLASSES: "classification",
    Encoding.LABELS: "multi_label",
    Encoding.TEXT: "text_classification",
    Encoding.IDS: "recommendation",
    Encoding.TRANSCRIPTS: "speech_recognition",
}
_MOST_ROUNDED = 1e-3  # of a target's deviation, that it may lose in single precision
_ANY_TEXT = TensorSpec((1,), "int64", count=1, ragged=True)  # of which no token is known yet
_MOST_WHOLE_CLASSES = 30  # whole numbers with more values are numbers
_SPOKEN = "; paths of sounds beside what is said in them are for --task speech-recognition"


class TableFile(SourceKind):
    """The path of a table, or of a folder of its parts."""

    form: ClassVar[str] = "a table (.csv, .jsonl, .parquet)"
    reads: ClassVar[tuple[str, ...]] = ("input", "target", "columns", "split", "follow_links")
    is_read_by_url: ClassVar[bool] = True
    packages: ClassVar[tuple[str, ...]] = ("torchvision",)
    suffixes: ClassVar[tuple[str, ...]] = (".csv", ".tsv", ".jsonl", ".parquet")  # TABLES: read without an import
    tasks: ClassVar[tuple[str, ...]] = (
        "classification", "regression", "multi_label", "text_classification", "recommendation",
    )  # fmt: skip

    def takes(self, name: str) -> bool:
        """Whether it is a file with a suffix of tables, or a folder with `train.csv` or the like."""
        return Path(name).suffix.lower() in TABLES or is_folder_of_tables(Path(name).expanduser())

    def check(self, name: str) -> None:
        """Refuse a file that is not there.

        Raises:
            UserError: names it.
        """
        if not Path(name).expanduser().exists():
            raise UserError(f"data {name}: no such file")

    def outline(self, request: DataRequest) -> DataOutline:
        """Return the task that the target column is for, and the inputs; reads the columns alone that tell it."""
        self.check(str(request.path))
        if _is_implicit(request):
            _interaction_columns(request, TableParts.of(request))
            return DataOutline(_TASKS[Encoding.IDS], (TensorSpec((), "int64"), TensorSpec((), "int64")))
        return _outline(request, TableParts.of(request))

    def open(self, request: DataRequest) -> Source:
        """Read the table; where it has no part for evaluation, rows are held out by the seed."""
        if _is_implicit(request):
            return _interactions(request)
        return _opened(request, TableParts.of(request))


SOURCE = TableFile


def outline_of_tables(request: DataRequest, tables: Mapping[str, pa.Table]) -> DataOutline:
    """Return what the target column of tables that are read already is for (`open_tables`)."""
    return _outline(request, TableParts.of_tables(request, tables))


def open_tables(request: DataRequest, tables: Mapping[str, pa.Table]) -> Source:
    """Open tables that are read already, as those of files.

    Args:
        tables: by the names of their parts: `train`, and `val` and `test` where they are there.

    Raises:
        UserError: a column is not there, or holds what the task cannot use.
    """
    return _opened(request, TableParts.of_tables(request, tables))


def _outline(request: DataRequest, files: TableParts) -> DataOutline:
    inputs, targets = files.columns(request)
    specs = tuple(TensorSpec() for _ in inputs)
    _check_encoding(request)
    if request.encoding is Encoding.IDS:
        ids = TensorSpec((), "int64")
        specs = (ids,) * len(inputs)
        if len(inputs) > 2:  # two columns can but be ids, so that no more than their names are read
            forms = _forms(
                request, files.read(inputs), inputs, MeasuredColumns(request.folder, request.config.measures)
            ).forms
            specs = tuple(ids if forms[name] is Form.CATEGORIES else TensorSpec() for name in inputs)
    is_one = len(inputs) == 1
    if request.encoding is not Encoding.AUTO and not (is_one and request.encoding.judges_text):
        return DataOutline(_TASKS[request.encoding], specs)
    table = files.read((*(inputs if is_one else ()), *targets))
    sample_index = RowSampleIndex.of(None, request.config.source, len(table), lambda _: "")
    rows = _Rows(table, 0, 0, inputs, targets, MeasuredColumns(None), files, np.arange(len(table)), sample_index)
    encoding = rows.encoding(request)
    return DataOutline(_TASKS[encoding], (_ANY_TEXT,) if rows.reads_texts(encoding) else specs)


def _forms(request: DataRequest, table: pa.Table, inputs: Sequence[str], measured: MeasuredColumns) -> InputForms:
    """Return what each input is taken as.

    Raises:
        UserError: it is described as what it cannot be.
    """
    columns = {name: table[name] for name in inputs}
    return input_forms(columns, request.config.columns, measured, request.encoding is Encoding.IDS)


def _opened(request: DataRequest, files: TableParts) -> Source:
    rows = _Rows.read(request, files)
    encoding = rows.encoding(request)
    try:
        source = rows.encoded(request, encoding)
    except UserError as error:
        raise UserError(f"data {request.config.source}: {error}") from error
    rows.measured.keep()
    return replace(source, notes=(*files.notes, *source.notes, *rows.measured.notes))


def _is_implicit(request: DataRequest) -> bool:
    """Whether rows say who took what, without a target."""
    return request.encoding is Encoding.IDS and not request.config.target


def _interaction_columns(request: DataRequest, files: TableParts) -> InteractionColumns:
    """Return the columns that tell who took what, without a target, by their names alone.

    Raises:
        UserError: there are several parts, or other columns than two.
    """
    first, *others = files.files
    if request.config.split and files.split:
        raise UserError(
            f"data {request.config.source}: --split {files.split}: without --target, the last of each user are held "
            "out: leave out --split"
        )
    if others:
        raise UserError(
            f"data {request.config.source}: without --target, the last of each user are held out of one table; here "
            f"are {', '.join(file.path.name for file in (first, *others))}"
        )
    named = listed(request.config.input)
    time = request.config.time or time_among(first.names, named)
    kept = [name for name in first.names if not says_where(request, name)]
    inputs = named or tuple(name for name in kept if name not in (time, files.split))
    check_known(first.names, (*inputs, *([time] if time else [])), first.path)
    if len(inputs) != 2:
        raise UserError(
            f"data {request.config.source}: --task {request.task} without --target learns from who took what: name two "
            f"columns of {', '.join(first.names)}: --input USER,ITEM"
        )
    return InteractionColumns(inputs, time)


def _interactions(request: DataRequest) -> Source:
    """Return who took what, without a target.

    Raises:
        UserError: there are several parts, or the columns are no ids.
    """
    parts = TableParts.of(request)
    columns, first = _interaction_columns(request, parts), parts.files[0]
    ignored = [f"column {parts.split} does not divide the rows: the last of each user are held out"] * bool(parts.split)
    measured = MeasuredColumns(request.folder, request.config.measures)
    table = first.read(tuple(dict.fromkeys((*columns.inputs, *([columns.time] if columns.time else [])))))
    try:
        source = interactions_source(request, table, columns, measured)
    except UserError as error:
        raise UserError(f"data {request.config.source}: {error}") from error
    measured.keep()
    return replace(source, notes=(*ignored, *source.notes, *measured.notes))


@dataclass(frozen=True)
class _Rows:
    """The rows of all parts, training rows first.

    Attributes:
        table: with the columns that are used.
        train, evaluation: number of rows of these parts; those that follow are of the test set.
        inputs, targets: names of columns.
        measured: what was measured of columns.
        origin: place of each row in the file of its part.
        files: that the rows are of.
        sample_index: of the rows of the training part.
        notes: how the rows were divided.
    """

    table: pa.Table
    train: int
    evaluation: int
    inputs: tuple[str, ...]
    targets: tuple[str, ...]
    measured: MeasuredColumns
    files: TableParts
    origin: NDArray[np.int64]
    sample_index: RowSampleIndex
    notes: tuple[str, ...] = ()

    @classmethod
    def read(cls, request: DataRequest, files: TableParts) -> _Rows:
        """Read the files, and divide their rows.

        Raises:
            UserError: a file cannot be read, or lacks a column or rows.
        """
        inputs, targets = files.columns(request)
        tables = files.each((*inputs, *targets))
        first = tables[0]
        sample_index = RowSampleIndex.of(
            request.folder, request.config.source, len(first), lambda count: table_digest(first.slice(0, count))
        )
        tables[0] = first.slice(0, sample_index.count)
        table = files.joined(tables)
        measured = MeasuredColumns(request.folder, request.config.measures)
        held = len(tables[1]) if files.has_validation else 0
        origin = np.concatenate([files.places(part, np.arange(len(rows))) for part, rows in enumerate(tables)])
        rows = cls(table, sample_index.count, held, inputs, targets, measured, files, origin, sample_index)
        return rows if held else rows._divided(request, files.has_test)

    def _divided(self, request: DataRequest, has_test: bool) -> _Rows:
        """Return the rows with some of the training part held out."""
        divided = held_out_of_begun(request, self.sample_index, has_test, "row")
        train, held = divided.train, divided.evaluation
        order = np.concatenate([train, held, np.arange(self.train, len(self.table))])
        table, origin = self.table.take(pa.array(order)), self.origin[order]
        return replace(self, table=table, origin=origin, train=len(train), evaluation=len(held), notes=divided.notes)

    def encoding(self, request: DataRequest) -> Encoding:
        """Return what is made of the columns: as the task wants it, else by the target.

        Raises:
            UserError: a target has missing values, or the target suits no task.
        """
        for name in self.targets:
            self._refuse_missing(request, name)
        _check_encoding(request)
        if request.encoding is not Encoding.AUTO:
            return request.encoding
        columns = [self.table[name] for name in self.targets]
        if len(columns) > 1:
            return Encoding.NUMBERS
        if holds_labels(columns[0]):
            return Encoding.LABELS
        of_texts = self._has_texts()
        if is_string(columns[0]) or pa.types.is_boolean(columns[0].type) or (of_texts and is_whole(columns[0])):
            return Encoding.TEXT if of_texts else Encoding.CLASSES
        few = is_whole(columns[0]) and pc.count_distinct(columns[0]).as_py() <= min(
            _MOST_WHOLE_CLASSES, len(self.table) // 3
        )
        return Encoding.CLASSES if few else Encoding.NUMBERS

    def reads_texts(self, encoding: Encoding) -> bool:
        """Whether the inputs are one column that is cut into tokens."""
        return encoding is Encoding.TEXT or (encoding.judges_text and self._has_texts())

    def _has_texts(self) -> bool:
        """Whether the only input holds texts; a run that goes on has it as it began."""
        if len(self.inputs) > 1:
            return False
        name = self.inputs[0]
        if self.measured.has(name):
            return is_string(self.table[name]) and self.measured.form(name) is None
        return _are_texts(self.table[name])

    def _refuse_missing(self, request: DataRequest, name: str) -> None:
        values = self.table[name]
        absent = values.is_null(nan_is_null=True)
        if holds_labels(values) or not pc.any(absent).as_py():
            return
        count = pc.sum(absent).as_py()
        row = int(self._places(name)[0]) + 1
        raise UserError(
            f"data {request.config.source}: the target {name} is missing in row {row}"
            f"{f', and in {count - 1} more' if count > 1 else ''} (empty, or such as NA or null): remove such rows"
        )

    def _places(self, name: str) -> NDArray[np.int64]:
        """Return where values are missing in the file of the training part, else in the evaluation part."""
        for part, table in enumerate(self.files.each((name,))):
            absent = table[name].is_null(nan_is_null=True).to_numpy()
            if absent.any():
                return self.files.places(part, np.flatnonzero(absent))
        return np.zeros(1, np.int64)

    def encoded(self, request: DataRequest, encoding: Encoding) -> Source:
        """Return the columns in the form that a task wants.

        Raises:
            UserError: a column holds what the task cannot use.
        """
        if self.reads_texts(encoding):
            return self.texts_source(request, encoding)
        if encoding is Encoding.TRANSCRIPTS:
            return self.sounds_source(request)
        return self.ids_source(request) if encoding is Encoding.IDS else self.source(request, encoding)

    def source(self, request: DataRequest, encoding: Encoding) -> Source:
        """Return numbers and categories with targets of a form.

        Raises:
            UserError: a column holds what the task cannot use.
        """
        forms = _forms(request, self.table, self.inputs, self.measured)
        inputs, specs, notes, unknown = self._numbers_and_categories(forms)
        numbers = specs["numbers"] if set(specs) == {"numbers"} else None
        targets, facts = self._targets(encoding)
        info = replace(
            facts,
            name=request.config.source,
            channels=numbers.shape[0] if numbers else 1,
            train_size=self.train,
            eval_size=self.evaluation,
            shape=numbers.shape if numbers else None,
            several=None if numbers else specs,
            task=_TASKS[encoding],
            columns=self.inputs,
        )
        values = inputs["numbers"] if numbers else inputs
        if request.tell_whole is None and encoding is Encoding.CLASSES:  # else nothing is trained on these rows
            notes += class_notes(info, targets[self.train :], "row")
        notes += self._marks_note(request, encoding, info)
        return self._cut(values, targets, info, notes, unknown)

    def _marks_note(self, request: DataRequest, encoding: Encoding, info: DataInfo) -> list[str]:
        """Say that lists hold a mark for each label, and of several targets learnt as numbers that they could be."""
        name = self.targets[0]
        if encoding is Encoding.LABELS and len(self.targets) == 1:
            marks = marks_of_lists(self.table[name])
            if marks is None or info.classes != names_of_marks(name, marks):
                return []
            return [f"{name} holds lists of 0 and 1: a mark for each of {len(info.classes)} labels"]
        is_chosen = request.encoding is not Encoding.AUTO or encoding is not Encoding.NUMBERS
        if is_chosen or len(self.targets) < 2 or not all(are_marks(self.table[name]) for name in self.targets):
            return []
        return [f"{', '.join(self.targets)} are 0 or 1 in each row: --task multi-label learns them as labels"]

    def ids_source(self, request: DataRequest) -> Source:
        """Return ids, such as of users and items, with a number each: a rating, or whether it was clicked (0 or 1).

        Ids are by position; beside columns of floats, which are numbers, they are `categories`, of one common count.

        Raises:
            UserError: there are no two columns of ids, or the target is no number.
        """
        if len(self.targets) > 1:
            raise UserError(f"--task {request.task} has one target: a rating, or 0 and 1")
        forms = _forms(request, self.table, self.inputs, self.measured)
        columns = {
            name: numbered(name, self.table[name], self.measured.of(name, known_values, self.table[name][: self.train]))
            for name in forms.of(Form.CATEGORIES)
        }
        if len(columns) < 2:
            raise UserError(
                f"--task {request.task} needs two columns of ids, whole numbers or strings: --input USER,ITEM"
            )
        inputs, specs, notes = self._ids_and_numbers(columns, forms)
        notes += [note for name in columns for note in self._missing_note(name)]
        targets, facts = self._targets(Encoding.NUMBERS)
        if self._are_clicks(targets, facts):
            facts = replace(facts, targets=TensorSpec(count=2), target_mean=(), target_std=())
            notes = [*notes, f"{self.targets[0]} is 0 or 1 in each row: it is learnt as clicks"]
        info = replace(
            facts,
            name=request.config.source,
            train_size=self.train,
            eval_size=self.evaluation,
            several=specs,
            task=_TASKS[Encoding.IDS],
            columns=self.inputs,
        )
        unseen = [
            f"{count} of {len(self.table) - self.train} rows held out have a value of {name} that no training row has"
            for name, column in columns.items()
            if (count := self._count_unknown(name, column, slice(self.train, None)))
        ]
        return self._cut(inputs, targets, info, [*notes, *unseen], self._unknown_of_new(columns))

    def _are_clicks(self, targets: NDArray[np.generic], facts: DataInfo) -> bool:
        """Whether a target is 0 or 1 in each row, and both in the run's own rows.

        Raises:
            UserError: it is the same in each row.
        """
        name, there = self.targets[0], set(np.unique(targets).tolist())
        if self.measured.has(name):  # other rows of a run may have one of both alone; 0 and 1 alone have this deviation
            mean, std = facts.target_mean[0], facts.target_std[0]
            return there <= {0.0, 1.0} and abs(std**2 - mean * (1 - mean)) < _MOST_ROUNDED
        if len(there) == 1:
            raise UserError(
                f"the target {name} is {next(iter(there)):g} in each row, so that there is nothing to learn: leave out "
                "--target, which draws items that a user did not take"
            )
        return there == {0.0, 1.0}

    def _ids_and_numbers(self, columns: Mapping[str, Numbered], forms: InputForms) -> tuple[Nest, Nest, list[str]]:
        """Return inputs, their specs, and notes, of columns of ids and of others, which hold numbers."""
        if len(columns) == len(self.inputs):
            alone = tuple(TensorSpec((), "int64", column.count) for column in columns.values())
            return tuple(column.ids for column in columns.values()), alone, []
        others = replace(self, inputs=tuple(name for name in self.inputs if name not in columns))
        inputs, specs, notes, _ = others._numbers_and_categories(forms)
        inputs["categories"], specs["categories"] = _on_one_count(columns.values())
        return inputs, specs, notes

    def texts_source(self, request: DataRequest, encoding: Encoding) -> Source:
        """Return texts as token ids, with targets of a form: a class each, labels, or numbers.

        Raises:
            UserError: it is not one column of strings, or the target is of another form.
        """
        if len(self.inputs) > 1 or not is_string(self.table[self.inputs[0]]):
            raise UserError("--task text-classification reads one column of strings: name it with --input")
        texts = [text or "" for text in self.table[self.inputs[0]].to_pylist()]
        column = encode_texts(
            request, texts, self.train, self.train - (self.sample_index.count - self.sample_index.begun)
        )
        targets, facts = self._targets(Encoding.CLASSES if encoding is Encoding.TEXT else encoding)
        info = replace(
            facts,
            name=request.config.source,
            train_size=self.train,
            eval_size=self.evaluation,
            several=column.specs,
            task=_TASKS[encoding],
            tokeniser=column.tokeniser,
            columns=self.inputs,
        )
        note = f"texts (column {self.inputs[0]}) are cut into tokens, of a vocabulary of {column.tokeniser.count:,}"
        return self._cut(column.inputs, targets, info, [note, *self._marks_note(request, encoding, info)])

    def sounds_source(self, request: DataRequest) -> Source:
        """Return the sound files that a column names, with the transcripts of another.

        Raises:
            UserError: it is not one column of strings each, a file is not there, or lies out of the table's folder.
        """
        columns = [self.table[name] for name in (*self.inputs, *self.targets)]
        if len(columns) != 2 or not all(map(is_string, columns)):
            raise UserError(
                "--task speech-recognition reads one column of paths of sound files, and one of what is said in them: "
                "--input PATH --target TEXT"
            )
        path = Path(request.config.source).expanduser()
        folder = path if path.is_dir() else path.parent
        names, texts = ([str(value or "") for value in column.to_pylist()] for column in columns)
        absent = next((name for name in names if not (folder / name).is_file()), None)
        if absent is not None:
            raise UserError(
                f"column {self.inputs[0]} names {absent!r}, and there is no file {folder / absent}: paths are from the "
                "folder of the table"
            )
        links = FolderLinks(folder, request.config.follow_links, SOUND_FILES)
        links.count(folder / name for name in names)
        links.check()
        rows = Recordings.in_folder(folder, names, [plain_text(text) for text in texts])
        end = self.train + self.evaluation
        places = np.arange(len(names))
        train, held, test = (rows.some(part) for part in np.split(places, [self.train, end]))
        source = transcribed(request, train, held, test if test.names else None)
        info = replace(source.info, stages=self.sample_index.trained_stages(self.train))
        notes = (*links.notes, *self.notes, *source.notes)
        return replace(source, info=info, notes=notes, sample_index=self.sample_index)

    def _missing_note(self, name: str) -> list[str]:
        """Say how many values of a column of categories are missing."""
        values = self.table[name]
        if not values.null_count:
            return []
        what = "are missing (empty, or such as NA or null): they are one category, with those that no training row has"
        return [f"{name}: {values.null_count} of {len(values)} values {what}"]

    def _unknown_of_new(self, columns: Mapping[str, Numbered]) -> list[str]:
        """Say how many rows that came after the run began have values that it does not know, which share an id."""
        later = self.sample_index.count - self.sample_index.begun
        new = slice(self.train - later, self.train)
        told = []
        for name, column in columns.items():
            if unknown := self._count_unknown(name, column, new):
                what = f"have a value of {name} that was not there when the run began"
                told.append(f"{unknown} of {later} new rows {what}: all such values are one to its model")
        return told

    def _count_unknown(self, name: str, column: Numbered, rows: slice) -> int:
        """Return how many of some rows have a value of a column, and one that is not known."""
        return int((self.table[name].is_valid().to_numpy()[rows] & (column.ids[rows] == UNSEEN)).sum())

    def _cut(
        self,
        inputs: Nest,
        targets: NDArray[np.generic],
        info: DataInfo,
        notes: Sequence[str],
        of_new: Sequence[str] = (),
    ) -> Source:
        """Return the parts of the rows; `of_new` is what a user has to know of those that came later."""
        end = self.train + self.evaluation
        rows = np.arange(len(self.table))
        info = replace(info, stages=self.sample_index.trained_stages(self.train))

        def samples(part: NDArray[np.int64]) -> TensorArray:
            """Return the samples of some rows."""
            values, wanted = map_leaves(lambda column: _some(column, part), (inputs, targets))
            return TensorArray(values, wanted, self.origin[part])

        train, held, test = (samples(part) for part in (rows[: self.train], rows[self.train : end], rows[end:]))
        told, index = (*self.notes, *notes, *of_new), self.sample_index
        return Source(train, held, info, told, test if len(test) else None, index, of_new=tuple(of_new))

    def _numbers_and_categories(
        self, forms: InputForms
    ) -> tuple[dict[str, NDArray[np.generic]], dict[str, TensorSpec], list[str], list[str]]:
        """Return the inputs, their specs, notes, and those of new rows; the ids of all categories count on."""
        categories: dict[str, Numbered] = {}
        numbers, notes = [], [forms.note()] if forms.note() else []
        for name in self.inputs:
            values, form = self.table[name], forms.forms[name]
            if form is Form.NUMBERS:
                facts = self.measured.of(name, number_facts, values[: self.train])
                column = standardised(read_strings(name, values, facts.unit, self.origin), facts)
                numbers.append(column.values)
                if is_named_id(name) and is_whole(values) and _hardly_repeat(count_different(values), len(values)):
                    notes.append(
                        f"{name} has another value in nearly each row, and is taken as a number: if it is an id, "
                        "nothing is learnt of it; --input names the others"
                    )
                if column.missing:
                    what = f"missing or infinite ({column.infinite})" if column.infinite else "missing"
                    notes.append(f"{name}: {column.missing} of {len(values)} values are {what}: the mean stands there")
            elif form is Form.CATEGORIES:
                known = numbered(name, values, self.measured.of(name, known_values, values[: self.train]))
                if not self.measured.has(name) and _hardly_repeat(known.count, self.train):
                    raise UserError(
                        f"column {name} has another value in nearly each row, which is no number and no category"
                        f"{stray(values)}: convert it (numbers as 1234.5, dates as 2020-12-31), or leave it out of "
                        f"--input{_SPOKEN if _are_sounds(values) else ''}"
                    )
                categories[name] = known
                notes += self._missing_note(name)
            else:
                what = "nothing" if form is Form.NOTHING else f"{form.value if form is not Form.OTHER else values.type}"
                others = "leave it out, with --input naming the others"
                if form is Form.TEXTS:
                    alone = f"--input {name} with --task text-classification, multi-label or regression reads it alone"
                    others = alone if len(self.inputs) == 1 else f"{others}; {alone}"
                raise UserError(f"column {name} holds {what}, neither numbers nor categories: {others}")
        inputs: dict[str, NDArray[np.generic]] = {}
        specs: dict[str, TensorSpec] = {}
        if numbers:
            inputs["numbers"], specs["numbers"] = np.stack(numbers, axis=1), TensorSpec((len(numbers),))
        if categories:
            inputs["categories"], specs["categories"] = _on_one_count(categories.values())
        return inputs, specs, notes, self._unknown_of_new(categories)

    def _targets(self, encoding: Encoding) -> tuple[NDArray[np.generic], DataInfo]:
        """Return the targets, and what is known of the data by them alone."""
        facts = DataInfo("", (), 1, 1, 0, 0, ())
        if encoding is Encoding.NUMBERS:
            return self._number_targets(facts)
        if encoding is Encoding.LABELS and len(self.targets) > 1:
            marked = marks_of_columns(self.table, self.targets)
            return marked, self._with_labels(facts, marked, self.targets)
        if len(self.targets) > 1:
            raise UserError(
                f"{len(self.targets)} targets are for --task regression, or multi-label if they are 0 and 1; name one "
                "--target"
            )
        name = self.targets[0]
        if encoding is Encoding.CLASSES:
            known = classes_of(name, self.table[name], self.measured)
            counts = np.bincount(known.numbers[: self.train], minlength=len(known.names))
            return known.numbers, replace(
                facts, classes=known.names, class_counts=tuple(counts.tolist()), targets=CLASS_NUMBER
            )
        marked, names = labels_of_rows(name, self.table[name], self.measured)
        return marked, self._with_labels(facts, marked, names)

    def _with_labels(self, facts: DataInfo, marked: NDArray[np.float32], names: tuple[str, ...]) -> DataInfo:
        """Return what is known of the data with the names of labels, and the counts of those that rows have."""
        counts = marked[: self.train].sum(0).astype(int)
        return replace(facts, classes=names, class_counts=tuple(counts.tolist()), targets=TensorSpec((len(names),)))

    def _number_targets(self, facts: DataInfo) -> tuple[NDArray[np.generic], DataInfo]:
        columns = []
        for name in self.targets:
            if form_of(self.table[name]) is not Form.NUMBERS:
                example = self.table[name][0].as_py()
                if isinstance(example, list):
                    raise UserError(
                        f"the target {name} holds lists, such as {example!r}: make a column of each number, and name "
                        f"them: --target {name}_1,{name}_2"
                    )
                raise UserError(
                    f"the target {name} holds no numbers, but such as {example!r}: is another --task meant?"
                )
            columns.append(as_numbers(self.table[name]))
        values = np.stack(columns, axis=1)
        if not np.isfinite(values).all():
            raise UserError(f"the target {self.targets[int(np.argwhere(~np.isfinite(values))[0][1])]} is not finite")
        measured = [
            self.measured.of(name, mean_and_std, column[: self.train])
            for name, column in zip(self.targets, columns, strict=True)
        ]
        for name, column, of_column in zip(self.targets, columns, measured, strict=True):
            if np.abs(column.astype(np.float32) - column).max() > _MOST_ROUNDED * of_column.std:
                raise UserError(
                    f"the target {name} lies within {of_column.std:.3g} of {of_column.mean:.9g}, which single "
                    f"precision cannot tell apart: subtract a constant, such as {of_column.mean:.0f}"
                )
        shape = () if len(columns) == 1 else (len(columns),)
        facts = replace(
            facts,
            targets=TensorSpec(shape),
            target_names=self.targets,
            target_mean=tuple(facts_of.mean for facts_of in measured),
            target_std=tuple(facts_of.std for facts_of in measured),
        )
        return values.astype(np.float32).reshape(len(values), *shape), facts


def _on_one_count(columns: Iterable[Numbered]) -> tuple[NDArray[np.int64], TensorSpec]:
    """Return the ids of columns side by side, those of each beginning where those of the one before end."""
    several = list(columns)
    first = np.cumsum([0, *(column.count for column in several)])
    ids = np.stack([column.ids + start for column, start in zip(several, first, strict=False)], axis=1)
    return ids, TensorSpec((len(several),), "int64", int(first[-1]))


def _hardly_repeat(different: int, rows: int) -> bool:
    """Whether values are so many that nothing can be learnt of each."""
    return 2 * different > rows + 4 and different > _MOST_WHOLE_CLASSES


def _are_texts(values: pa.ChunkedArray) -> bool:
    """Whether the only input holds texts: strings that are long, or are neither categories nor numbers."""
    if form_of(values) is Form.TEXTS or not is_string(values):
        return form_of(values) is Form.TEXTS
    return _hardly_repeat(count_different(values), len(values)) and bool(pc.any(_has_words(values)).as_py())


def _has_words(values: pa.ChunkedArray) -> pa.ChunkedArray:
    return pc.match_substring_regex(values, r"\pL{2,}\s+\pL")


def _some(column: NDArray[np.generic] | RaggedArray, rows: NDArray[np.int64]) -> NDArray[np.generic] | RaggedArray:
    """Return some rows of a column."""
    return column.subset(rows) if isinstance(column, RaggedArray) else np.ascontiguousarray(column[rows])


def _check_encoding(request: DataRequest) -> None:
    if request.encoding is not Encoding.AUTO and request.encoding not in _TASKS:
        raise UserError(f"data {request.config.source} is a table, which --task {request.task} does not take")


def _are_sounds(values: pa.ChunkedArray) -> bool:
    return str(values[0]).lower().endswith(SOUND_FILES.extensions)
