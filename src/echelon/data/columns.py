"""Columns of a table as arrays: numbers standardised; categories, ids and classes numbered; texts as token ids.

What is measured (means, the values that are known) is measured on the training rows. A run keeps it: other rows that
the run is evaluated on are encoded as its own were.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum, auto
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from echelon.core.errors import UserError, nearest
from echelon.core.files import write_atomic
from echelon.data.base import DataInfo, DataRequest
from echelon.data.column_numbers import as_numbers, is_string, read_strings, stray, unit_of
from echelon.data.ragged import RaggedArray
from echelon.data.tokenisers import Tokeniser, tokeniser_for
from echelon.tasks.nest import Nest, TensorSpec

RUN_FILE = "columns.json"
Values = TypeVar("Values")
UNSEEN = 0
"""The id of a value that no training row has, and of a missing one."""
_TEXT_CHARACTERS = 20  # from this mean length on, strings that hardly repeat are texts
_HASHED_ROWS = 65_536  # at a time
_SEPARATORS = ("|", ";")
_SEVERAL = 0.05  # share of strings with a separator from which on they are labels
IDS, MASK = "input_ids", "attention_mask"  # what models of texts call their inputs, those of transformers too
MOST_TOKENS = 512  # of a text; what is longer is cut


class Form(Enum):
    """What a column holds."""

    NUMBERS = "numbers"
    CATEGORIES = "strings"
    TEXTS = "texts"
    LISTS = "lists"
    NOTHING = "nothing"
    OTHER = auto()


def form_of(values: pa.ChunkedArray) -> Form:
    """Return what a column holds, by its type; strings that are long and hardly repeat are texts."""
    kind = values.type
    if pa.types.is_null(kind) or values.null_count == len(values):
        return Form.NOTHING
    if pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return Form.NUMBERS
    if pa.types.is_decimal(kind) or pa.types.is_temporal(kind):
        return Form.NUMBERS
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return Form.LISTS
    if not is_string(values):
        return Form.OTHER
    long = pc.mean(pc.utf8_length(values)).as_py() >= _TEXT_CHARACTERS
    return Form.TEXTS if long and 4 * pc.count_distinct(values).as_py() > len(values) else Form.CATEGORIES


def is_whole(values: pa.ChunkedArray) -> bool:
    """Whether a column holds whole numbers, by its type."""
    return bool(pa.types.is_integer(values.type) or pa.types.is_boolean(values.type))


_ID_NAME = re.compile(r"(?:^|[^a-z])(?:id|ids|uuid|code|zip|zipcode|postcode)$", re.IGNORECASE)
_ID_SUFFIX = re.compile(r"[a-z0-9]I[dD]s?$")  # userId, movieID
_VALUES = (Form.NUMBERS, Form.CATEGORIES, Form.TEXTS, Form.NOTHING)  # which depends on the rows that are there
_TAKEN_AS = {"number": Form.NUMBERS, "category": Form.CATEGORIES}
_FEW_VALUES = 30  # of a category, however few rows there are
_LISTED = 8  # columns of a kind that are named in a note


@dataclass(frozen=True)
class InputForms:
    """What the columns of inputs are taken as.

    Attributes:
        forms: by name.
        undecided: columns of whole numbers, which could be either.
    """

    forms: Mapping[str, Form]
    undecided: tuple[str, ...] = ()

    def of(self, form: Form) -> list[str]:
        """Return the names of the columns that are taken as a form."""
        return [name for name, each in self.forms.items() if each is form]

    def note(self) -> str:
        """Say what the columns became, and how to say otherwise; empty where none is of whole numbers."""
        if not self.undecided:
            return ""
        kinds = {"numbers": self.of(Form.NUMBERS), "categories": self.of(Form.CATEGORIES)}
        told = "; ".join(f"{kind}: {_listed(names)}" for kind, names in kinds.items() if names)
        name = self.undecided[0]
        other = "category" if self.forms[name] is Form.NUMBERS else "number"
        return f"{told} (to change it for columns of whole numbers: --columns {name}={other})"


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _LISTED
    return ", ".join(names[:_LISTED]) + (f" and {more} more" if more > 0 else "")


def input_forms(
    columns: Mapping[str, pa.ChunkedArray], described: str, measured: MeasuredColumns, are_ids: bool = False
) -> InputForms:
    """Return what each input column is taken as: as described, as the run has had it, else by its values and name.

    Whole numbers are categories where the name of the column says so (id, shop_id, userId, zip, code) and values
    repeat. Where ids are wanted, all whole numbers and strings are ids; beside columns of floats, those whose name says
    so, and of the others the first ones where there were no two.

    Args:
        columns: by name.
        described: such as `visits=number,shop=category`.
        are_ids: whether the task wants ids.

    Raises:
        UserError: it names no input, or what the column cannot be.
    """
    own = {name: _own_form(values, are_ids) for name, values in columns.items()}
    whole = [name for name, values in columns.items() if is_whole(values) and own[name] is Form.NUMBERS]
    begun = {name: form for name in columns if own[name] in _VALUES and (form := measured.form(name)) is not None}
    known = {name: own[name] if form is Form.NOTHING else form for name, form in begun.items()}
    wanted = _described_forms(columns, described, known)
    open_ones = [name for name in whole if name not in wanted and name not in known]
    if are_ids:
        has_floats = any(form is Form.NUMBERS and name not in whole for name, form in own.items())
        ids = [name for name in open_ones if not has_floats or is_named_id(name)]
        decided = {**own, **dict.fromkeys(ids, Form.CATEGORIES), **known, **wanted}
        lacking = max(0, 2 - sum(form is Form.CATEGORIES for form in decided.values()))
        ids += [name for name in open_ones if name not in ids][:lacking]
    else:
        ids = [name for name in open_ones if is_named_id(name) and _repeats(columns[name])]
    forms = {**own, **dict.fromkeys(ids, Form.CATEGORIES), **known, **wanted}
    return InputForms(forms, tuple(whole))


def _own_form(values: pa.ChunkedArray, are_ids: bool) -> Form:
    return Form.CATEGORIES if are_ids and is_string(values) else form_of(values)


def is_named_id(name: str) -> bool:
    """Whether a column's name says that it holds ids."""
    return bool(_ID_NAME.search(name) or _ID_SUFFIX.search(name))


def count_different(values: pa.ChunkedArray) -> int:
    """Return how many different values a column has."""
    return int(pc.count_distinct(values).as_py())


def _repeats(values: pa.ChunkedArray) -> bool:
    """Whether values are the same in many rows, so that something can be learnt of each."""
    count = count_different(values)
    return bool(count <= _FEW_VALUES or 2 * count <= len(values))


def _described_forms(
    columns: Mapping[str, pa.ChunkedArray], described: str, known: Mapping[str, Form]
) -> dict[str, Form]:
    """Return the forms that a user names; of a column that a run knows, whatever these rows have there.

    Raises:
        UserError: a column is no input, or cannot be that.
    """
    forms = {}
    for part in filter(None, (each.strip() for each in described.split(","))):
        name, _, kind = (each.strip() for each in part.partition("="))
        if name not in columns:
            raise UserError(
                f"--columns {part}: no input {name!r}: {nearest(name, columns)}it has {_listed([*columns])}"
            )
        if kind not in _TAKEN_AS:
            raise UserError(f"--columns {part}: write {name}=number or {name}=category")
        if name not in known and not is_whole(columns[name]):
            raise UserError(f"--columns {part}: {name} holds {columns[name].type}; only whole numbers may be either")
        forms[name] = _TAKEN_AS[kind]
    return forms


def is_id(values: pa.ChunkedArray) -> bool:
    """Whether a column may hold ids: whole numbers or strings."""
    return is_whole(values) or is_string(values)


@dataclass(frozen=True)
class ColumnFacts:
    """What is measured of a column.

    Attributes:
        mean, std: of numbers.
        known: values of any others, in the order of their numbers.
        unit: of numbers that are times, as `unit_of` returns it; empty: they are none, or of earlier versions.
    """

    mean: float = 0.0
    std: float = 1.0
    known: tuple[str | int | bool, ...] = ()
    unit: str = ""


class MeasuredColumns:
    """Facts of columns by their names: those that a run keeps, and those that are measured now.

    Attributes:
        is_kept: whether the run keeps any.
        notes: what a user has to know of facts that are another run's.
    """

    def __init__(self, folder: Path | None, measures: str = "") -> None:
        """Read what a run keeps.

        Args:
            folder: of the run; None: there is none.
            measures: folder of another run, whose facts are taken over where this one keeps none; empty: of no other.

        Raises:
            UserError: a file cannot be read.
        """
        self._file = folder / RUN_FILE if folder is not None else None
        self.is_kept = self._file is not None and self._file.is_file()
        self.notes: list[str] = []
        self._facts = _read_facts(self._file) if self._file is not None and self.is_kept else {}
        self._source, other = measures, Path(measures).expanduser() / RUN_FILE
        self._others = _read_facts(other) if measures and not self.is_kept and other.is_file() else {}

    def of(
        self, name: str, measure: Callable[[Values], ColumnFacts], values: Values, are_classes: bool = False
    ) -> ColumnFacts:
        """Return the facts of a column; measure its values where no run keeps any.

        Args:
            are_classes: another run's facts hold only if they name all values.
        """
        if name not in self._facts:
            other = self._others.get(name)
            measured = measure(values) if other is None or other.known else None
            if other is not None and measured is not None and (new := set(measured.known) - set(other.known)):
                what = f"values of column {name} that {self._source} did not know: {len(new)}"
                self.notes.append(f"{what}; its classes are others" if are_classes else f"{what}; they share one place")
                other = None if are_classes else other
            self._facts[name] = other or measured or measure(values)
        return self._facts[name]

    def has(self, name: str) -> bool:
        """Whether a run keeps facts of a column."""
        return self.is_kept or name in self._others

    def form(self, name: str) -> Form | None:
        """Return what a run has taken a column as; `NOTHING`: no value was there, or all 0; None: it keeps nothing."""
        facts = self._facts.get(name) or self._others.get(name)
        if facts is None:
            return None
        if facts == ColumnFacts():
            return Form.NOTHING
        return Form.CATEGORIES if facts.known else Form.NUMBERS

    @property
    def strings(self) -> tuple[str, ...]:
        """Return the names of the columns whose values the run knows as strings, whatever those of other rows are."""
        return tuple(name for name, facts in self._facts.items() if facts.known and isinstance(facts.known[0], str))

    def known(self, name: str) -> ColumnFacts:
        """Return the facts of a column that the run keeps.

        Raises:
            UserError: it keeps none.
        """
        if name not in self._facts:
            raise UserError(f"the run keeps nothing of column {name}: {self._file} is gone, or of other columns")
        return self._facts[name]

    def keep(self) -> None:
        """Write all facts to the run's folder, where there is one that keeps none yet."""
        if self._file is not None and not self.is_kept and self._file.parent.is_dir():
            facts = {name: asdict(each) for name, each in self._facts.items()}
            write_atomic(self._file, json.dumps(facts, ensure_ascii=False))


def _read_facts(file: Path) -> dict[str, ColumnFacts]:
    """Return the facts in a run's file.

    Raises:
        UserError: it cannot be read.
    """
    try:
        kept = json.loads(file.read_text(encoding="utf-8"))
        return {name: ColumnFacts(**{**facts, "known": tuple(facts["known"])}) for name, facts in kept.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file}: cannot be read ({error}): what the run measured is lost") from error


def _as_known(values: Sequence[str]) -> ColumnFacts:
    return ColumnFacts(known=tuple(values))


def table_digest(table: pa.Table) -> str:
    """Return a hash of a table's values, row by row: the same where whole numbers have come to be read as floats."""
    hashed = hashlib.sha256()
    for name in table.column_names:
        hashed.update(name.encode())
        for start in range(0, len(table), _HASHED_ROWS):
            values = table[name].slice(start, _HASHED_ROWS)
            kind = values.type
            if pa.types.is_null(kind):
                hashed.update(np.full(len(values), np.inf).tobytes())
            elif not (is_string(values) or pa.types.is_nested(kind) or pa.types.is_binary(kind)):
                hashed.update(np.nan_to_num(as_numbers(values), nan=np.inf).tobytes())  # one kind of missing value
            else:
                hashed.update(repr(values.to_pylist()).encode("utf-8", "surrogatepass"))
    return hashed.hexdigest()


def known_values(values: pa.ChunkedArray) -> ColumnFacts:
    """Return the facts of a column whose values are numbered: each that is there, sorted."""
    return ColumnFacts(known=tuple(pc.drop_null(pc.unique(values)).sort().to_pylist()))


def _value_set(name: str, values: pa.ChunkedArray, known: tuple[str | int | bool, ...]) -> pa.Array:
    """Return known values as an array of a column's type.

    Raises:
        UserError: the column is of another one.
    """
    try:
        return pa.array(known, type=values.type)
    except pa.ArrowException:
        raise UserError(f"column {name} holds {values.type}; the run's data has such as {known[0]!r} there") from None


@dataclass(frozen=True)
class Standardised:
    """Numbers less their mean, over their standard deviation; a missing one, or an infinite one, is the mean."""

    values: NDArray[np.float32]
    missing: int
    infinite: int


def standardised(values: pa.ChunkedArray, facts: ColumnFacts) -> Standardised:
    """Standardise a column of numbers."""
    numbers = as_numbers(values, facts.unit)
    absent, infinite = ~np.isfinite(numbers), int(np.isinf(numbers).sum())
    numbers[absent] = facts.mean
    return Standardised(((numbers - facts.mean) / facts.std).astype(np.float32), int(absent.sum()), infinite)


def number_facts(values: pa.ChunkedArray) -> ColumnFacts:
    """Return the facts of a column of numbers or of times."""
    return replace(mean_and_std(as_numbers(values)), unit=unit_of(values.type))


def mean_and_std(numbers: NDArray[np.float64]) -> ColumnFacts:
    """Return mean and deviation of the finite numbers of `(N,)`; of a constant, or of nothing, the deviation is 1."""
    numbers = numbers[np.isfinite(numbers)]
    if not len(numbers):
        return ColumnFacts()
    mean, std = float(numbers.mean()), float(numbers.std())
    return ColumnFacts(mean, std if std > 1e-9 * abs(mean) else 1.0)


@dataclass(frozen=True)
class Numbered:
    """Ids of a column's values, 0 to `count` - 1."""

    ids: NDArray[np.int64]
    count: int


def numbered(name: str, values: pa.ChunkedArray, facts: ColumnFacts) -> Numbered:
    """Number the values of a column; those that are not known, and missing ones, share the id 0.

    Raises:
        UserError: the column is of another type than the known values.
    """
    if pa.types.is_null(values.type):  # missing in each row
        return Numbered(np.full(len(values), UNSEEN, np.int64), len(facts.known) + 1)
    places = pc.index_in(values, value_set=_value_set(name, values, facts.known)).combine_chunks()
    ids = pc.fill_null(pc.add(places, 1), UNSEEN).to_numpy(zero_copy_only=False).astype(np.int64)
    return Numbered(ids, len(facts.known) + 1)


@dataclass(frozen=True)
class Classes:
    """Class numbers `(N,)` and the names of the classes, those of all rows."""

    numbers: NDArray[np.int64]
    names: tuple[str, ...]


def inputs_of_rows(table: pa.Table, info: DataInfo, measured: MeasuredColumns) -> Nest:
    """Return rows that are in no part of the data as the model takes them, by what a run keeps of its columns.

    Columns whose values are known are numbered, all others standardised; of several inputs, ids of categories count on.

    Raises:
        UserError: a column is not there, or holds another type than the run's.
    """
    ids: list[Numbered] = []
    numbers: list[NDArray[np.float32]] = []
    for name in info.columns:
        if name not in table.column_names:
            there = ", ".join(table.column_names)
            raise UserError(f"no column {name!r}: {nearest(name, table.column_names)}there are {there}")
        facts = measured.known(name)
        try:
            if facts.known:
                column: Numbered | Standardised = numbered(name, table[name], facts)
            else:
                column = standardised(read_strings(name, table[name], facts.unit), facts)
        except pa.ArrowException as error:
            raise UserError(f"column {name}: {str(error).splitlines()[0]}") from error
        if isinstance(column, Numbered):
            ids.append(column)
        else:
            numbers.append(column.values)
    if isinstance(info.inputs, tuple):
        return tuple(
            column.ids.reshape(-1, *(1 for _ in spec.shape)) for column, spec in zip(ids, info.inputs, strict=True)
        )
    first = np.cumsum([0, *(column.count for column in ids)])
    inputs: dict[str, NDArray[Any]] = {"numbers": np.stack(numbers, axis=1)} if numbers else {}
    if ids:
        inputs["categories"] = np.stack([column.ids + start for column, start in zip(ids, first, strict=False)], axis=1)
    return inputs if isinstance(info.inputs, dict) else inputs["numbers"]


def classes_of(name: str, values: pa.ChunkedArray, measured: MeasuredColumns) -> Classes:
    """Return the classes of a column of strings, or of whole numbers.

    Raises:
        UserError: numbers that are not whole, or no strings, more classes than half of the rows, or a class that the
            run's data does not have.
    """
    if not (is_whole(values) or is_string(values)):
        kind = "numbers that are no class numbers" if form_of(values) is Form.NUMBERS else "no classes"
        raise UserError(f"column {name} holds {kind} ({values.type}): use --task regression, or whole numbers")
    known = measured.of(name, known_values, values, are_classes=True).known
    if len(known) < 2 or (2 * len(known) > len(values) + 2 and not measured.has(name)):
        numbers = " Numbers are for --task regression" if is_whole(values) else ""
        strays = stray(values) if is_string(values) else ""
        raise UserError(
            f"column {name} has {len(known)} different values in {len(values)} rows{strays}: are these classes?"
            f"{numbers}"
        )
    places = pc.index_in(values, value_set=_value_set(name, values, known))
    if places.null_count:
        other = values.filter(pc.is_null(places))[0].as_py()
        raise UserError(f"column {name} has the class {other!r}, which the run's data does not have")
    return Classes(places.to_numpy().astype(np.int64), tuple(str(value) for value in known))


def holds_labels(values: pa.ChunkedArray) -> bool:
    """Whether a column holds any number of labels: lists, of floats only marks, or strings joined by `|` or `;`."""
    if form_of(values) is Form.LISTS:
        return not pa.types.is_floating(values.type.value_type) or marks_of_lists(values) is not None
    return is_string(values) and bool(_separator(values))


def labels_of_rows(
    name: str, values: pa.ChunkedArray, measured: MeasuredColumns
) -> tuple[NDArray[np.float32], tuple[str, ...]]:
    """Return which labels each row has, `(N, L)` of 0 and 1, and the names of the labels.

    Raises:
        UserError: it holds no labels, one alone, or one that the run's data does not have.
    """
    if not (form_of(values) is Form.LISTS or is_string(values)):
        raise UserError(
            f"column {name} holds {values.type}: labels are strings joined by | or ;, lists, or several columns of 0 "
            f"and 1 (--target {name},OTHER)"
        )
    if (marks := marks_of_lists(values)) is not None:
        of_marks = names_of_marks(name, marks)
        if measured.of(name, _as_known, of_marks, are_classes=True).known == of_marks:
            return marks, of_marks
    separator = "" if form_of(values) is Form.LISTS else _separator(values, least=0.0)
    rows = [_labels_of(row, separator) for row in values.to_pylist()]
    there = sorted({label for row in rows for label in row})
    names = tuple(str(label) for label in measured.of(name, _as_known, there, are_classes=True).known)
    if len(names) < 2:
        raise UserError(f"column {name} has {len(names)} different labels: at least 2 are needed")
    if new := set(there) - set(names):
        raise UserError(f"column {name} has the label {min(new)!r}, which the run's data does not have")
    index = {label: i for i, label in enumerate(names)}
    marked = np.zeros((len(rows), len(names)), np.float32)
    for i, row in enumerate(rows):
        marked[i, [index[label] for label in row]] = 1
    return marked, names


def are_marks(values: pa.ChunkedArray) -> bool:
    """Whether a column holds 0 and 1 alone, as numbers or booleans, in each row."""
    kind = values.type
    if not (is_whole(values) or pa.types.is_floating(kind)) or values.null_count:
        return False
    return set(pc.unique(values).to_pylist()) <= {0, 1}


def marks_of_lists(values: pa.ChunkedArray) -> NDArray[np.float32] | None:
    """Return lists as a mark for each label, `(N, L)`; None unless all are of one length above 1, of 0 and 1 alone.

    A row without a list has no label.
    """
    if form_of(values) is not Form.LISTS:
        return None
    lengths = pc.unique(pc.drop_null(pc.list_value_length(values))).to_pylist()
    marks = pc.list_flatten(values.filter(values.is_valid()))
    if len(lengths) != 1 or lengths[0] < 2 or not are_marks(marks):
        return None
    marked = np.zeros((len(values), lengths[0]), np.float32)
    marked[values.is_valid().to_numpy()] = as_numbers(marks).reshape(-1, lengths[0])
    return marked


def names_of_marks(name: str, marks: NDArray[np.float32]) -> tuple[str, ...]:
    """Return the names of the labels of lists of marks `(N, L)`, by their column's."""
    return tuple(f"{name}_{i}" for i in range(marks.shape[1]))


def marks_of_columns(table: pa.Table, names: Sequence[str]) -> NDArray[np.float32]:
    """Return columns of 0 and 1 as labels that rows have, `(N, L)`.

    Raises:
        UserError: one holds other values.
    """
    for name in names:
        if not are_marks(table[name]):
            others = [value for value in pc.unique(table[name]).to_pylist() if value not in (0, 1)]
            raise UserError(
                f"column {name} holds {others[0]!r}: several targets of --task multi-label are a label each, 0 or 1"
            )
    return np.stack([as_numbers(table[name]) for name in names], axis=1).astype(np.float32)


def _labels_of(row: Any, separator: str) -> list[str]:
    if row is None:
        return []
    parts = row if isinstance(row, list) else row.split(separator) if separator else [row]
    return [label for part in parts if (label := str(part).strip())]


def _separator(values: pa.ChunkedArray, least: float = _SEVERAL) -> str:
    """Return what joins labels; empty: nothing does, in at least a share of the rows, or in any."""
    shares = {each: pc.mean(pc.match_substring(values, each).cast("float64")).as_py() or 0.0 for each in _SEPARATORS}
    best = max(shares, key=lambda each: shares[each])
    return best if shares[best] >= least and shares[best] else ""


@dataclass(frozen=True)
class TextColumn:
    """Texts as token ids; of a batch they are padded to its longest, with a mask that says which are there.

    Attributes:
        inputs: `input_ids` and `attention_mask` of each text, int64 `(length,)`; padding is 0 in both.
        specs: of the inputs.
    """

    inputs: dict[str, RaggedArray]
    specs: dict[str, TensorSpec]
    tokeniser: Tokeniser


def encode_texts(request: DataRequest, texts: Sequence[str], train: int, begun: int | None = None) -> TextColumn:
    """Return texts as ids, by the tokeniser of `tokeniser_for`, with marks where a folder's adds them; at most 512.

    Training texts that came after the run began are cut to the longest of the others, for which the model was built.

    Args:
        texts: of all parts.
        train: how many of the first ones are for training: a tokeniser is trained on these alone.
        begun: how many of these the run began with; None: all.

    Raises:
        UserError: there is no such tokeniser, or no text to train one on.
    """
    if not any(text.strip() for text in texts[:train]):
        raise UserError(f"data {request.config.source}: column {request.config.input} holds no text")
    tokeniser = tokeniser_for(request, texts[:train], adds_marks=True)
    rows = tokeniser.encode(texts, MOST_TOKENS)
    first = train if begun is None else begun
    most = max(map(len, (*rows[:first], *rows[train:])), default=MOST_TOKENS)
    rows[first:train] = tokeniser.encode(texts[first:train], most)
    inputs = with_mask(rows)
    longest = inputs[IDS].shape[1:2]
    specs = {
        IDS: TensorSpec(longest, "int64", tokeniser.count, ragged=True),
        MASK: TensorSpec(longest, "int64", ragged=True),
    }
    return TextColumn(inputs, specs, tokeniser)


def with_mask(rows: Sequence[NDArray[np.int64]]) -> dict[str, RaggedArray]:
    """Return the ids `(tokens,)` of texts, an empty one as one zero, with a mask of those that are there."""
    ids = RaggedArray.of([row if len(row) else np.zeros(1, np.int64) for row in rows])
    return {IDS: ids, MASK: RaggedArray(np.ones_like(ids.values), np.cumsum(ids.lengths))}
