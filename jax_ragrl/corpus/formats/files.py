"""Readers of records from files: JSON, JSON lines, tables and parquet, plain or compressed.

A record carries its place ("x.jsonl, line 3"; in a JSON list "x.json, record 3") for errors. What
is a text is decided here for all formats: another value is refused, because its notation in Python
would become a gold answer that no reply matches.
"""

from __future__ import annotations

import ast
import bz2
import contextlib
import csv
import gzip
import io
import json
import lzma
import pathlib
import re
import reprlib
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

from jax_ragrl.errors import UserError
from jax_ragrl.json_text import loads

T = TypeVar("T")
Source: TypeAlias = pathlib.Path | str | Sequence[pathlib.Path]  # a file, or files read as one
PARQUET_MAGIC = b"PAR1"
MAX_RECORD = 1 << 26  # characters of a line; a zipped file of a megabyte may hold one of gigabytes
# Text compresses to a twentieth at best, but two megabytes of gzip can hold two gigabytes.
MAX_RATIO = 20
MIN_UNZIPPED = 1 << 25  # bytes that every compressed file may hold, whatever its ratio
MAX_WHOLE = 1 << 30  # bytes of a compressed file that is read whole: a JSON list, a document
HEAD_BYTES = 1 << 22  # enough for the first record of almost every file
# NumPy writes `array([...])`, the type of each entry, or no commas between texts.
NUMPY = re.compile(r"\s*(array\(|\[\s*np\.\w+\()")
ADJACENT_TEXTS = re.compile(r"""['"]\s+[rRbBuU]?['"]""")
NUMBERS = re.compile(r"\s*[\[({][-+.\deE,\s]*\d[-+.\deE,\s]*[\])}]\s*")  # with or without commas
UTF_16 = (b"\xff\xfe", b"\xfe\xff")  # byte order marks; that of UTF-8 is handled by its codec
# Containers that are not read, by their first bytes.
UNREAD = {
    b"\x28\xb5\x2f\xfd": "a zstd",
    b"7z\xbc\xaf": "a 7z",
    b"Rar!": "a RAR",
    b"ARROW1": "an Arrow",
    b"\xff\xff\xff\xff": "an Arrow",  # a stream, as `datasets` saves it
}


class Record(NamedTuple):
    """One record of a file."""

    place: str  # in the file, for error messages
    fields: Mapping[str, Any]  # values by name
    is_row: bool = False  # of a table, whose cells are texts whatever they mean


class _Unzipped(io.RawIOBase):
    """The content of a compressed file; damage and an extreme size become a `UserError`."""

    def __init__(self, path: pathlib.Path, kind: str, file: Any, limit: int):
        self._path, self._kind, self._file, self._limit, self._left = path, kind, file, limit, limit

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        damages = (EOFError, OSError, RuntimeError, zlib.error, lzma.LZMAError, zipfile.BadZipFile)
        try:
            count: int = self._file.readinto(buffer)
        except damages as error:
            raise UserError(
                f"{self._path}: damaged {self._kind} file ({error}): copy it again"
            ) from error
        self._left -= count
        if self._left < 0:
            raise UserError(
                f"{self._path}: this {self._kind} file holds more than {self._limit} bytes, which "
                "is too much to read from it: unzip it first, and give a large corpus as JSON lines"
            )
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


def _only_member(path: pathlib.Path) -> Any:
    try:
        archive = zipfile.ZipFile(path)
        names = [info.filename for info in archive.infolist() if not info.is_dir()]
        names = [name for name in names if not name.startswith("__MACOSX/")]
        if len(names) == 1:
            return archive.open(names[0])
    except (OSError, RuntimeError, ValueError, zipfile.BadZipFile) as error:
        raise UserError(f"{path}: unreadable zip archive ({error}): unzip it first") from error
    raise UserError(
        f"{path} is a zip archive of {len(names)} files, and only one of a single file is read: "
        "unzip it and name a file (or, if it is a spreadsheet, save it as CSV)"
    )


UNZIPPERS: Mapping[str, tuple[re.Pattern[bytes], Callable[[pathlib.Path], Any]]] = {
    "gzip": (re.compile(rb"\x1f\x8b"), gzip.open),
    "bzip2": (re.compile(rb"BZh[1-9](1AY&SY|\x17rE8P\x90)"), bz2.open),
    "xz": (re.compile(rb"\xfd7zXZ\0"), lzma.open),
    "zip": (re.compile(rb"PK(\x03\x04|\x05\x06)"), _only_member),
}


def open_bytes(path: pathlib.Path | str, *, whole: bool = False) -> io.BufferedReader:
    """Opens a file for reading bytes, unzipped if its first bytes identify a compression.

    A zip archive may hold one file. `whole` says that the content will be in memory at once, which
    limits it further.

    Raises:
      UserError: the path is missing or a folder, or another container; when read, the file is
        damaged, or holds more than `MAX_RATIO` times its size.
    """
    path = pathlib.Path(path)
    if not path.is_file():
        there = "is a folder" if path.is_dir() else "is a pipe, which can be read only once"
        why = there if path.exists() else "does not exist"
        raise UserError(f"{path} {why}: give the path of a data file")
    with path.open("rb") as file:
        magic = file.read(10)
    if name := next((name for start, name in UNREAD.items() if magic.startswith(start)), ""):
        raise UserError(
            f"{path} is {name} file, which is not read: unpack it, or convert Arrow to parquet"
        )
    kind = next((kind for kind, (start, _) in UNZIPPERS.items() if start.match(magic)), "")
    if not kind:
        return path.open("rb")
    limit = max(MIN_UNZIPPED, MAX_RATIO * path.stat().st_size)
    content = UNZIPPERS[kind][1](path)
    return io.BufferedReader(
        _Unzipped(path, kind, content, min(limit, MAX_WHOLE) if whole else limit), 1 << 18
    )


def open_text(
    path: pathlib.Path | str, newline: str | None = None, *, whole: bool = False
) -> io.TextIOWrapper:
    """Opens a file of UTF-8, or of UTF-16 with a byte order mark, see `open_bytes`."""
    file = open_bytes(path, whole=whole)
    try:
        encoding = "utf-16" if file.peek(2)[:2] in UTF_16 else "utf-8-sig"
    except BaseException:
        file.close()
        raise
    return io.TextIOWrapper(file, encoding, newline=newline)


def _guarded(path: pathlib.Path | str, read: Callable[[], T]) -> T:
    """Calls `read()`; another encoding becomes a `UserError`."""
    try:
        return read()
    except UnicodeDecodeError as error:
        place = ""
        # Text is decoded in blocks, and the error counts the bytes of its block.
        with open_bytes(path) as file:
            for number, line in enumerate(file, start=1) if error.encoding == "utf-8" else ():
                try:
                    line.decode()
                except UnicodeDecodeError as bad:
                    place = f", line {number}, byte {bad.start + 1}"
                    break
        raise UserError(
            f"{path}{place}: not {error.encoding.upper()} ({error.reason}): convert it to UTF-8"
        ) from error


def read_lines(path: pathlib.Path | str) -> Iterator[tuple[int, str]]:
    """Yields (line number from 1, line) of every line that is not blank."""
    with open_text(path, newline="\n") as file:
        number = 0
        # Not a for loop, because damage in the file raises its error within each read.
        while line := _guarded(path, lambda: file.readline(MAX_RECORD + 1)):
            number += 1
            if len(line) > MAX_RECORD:
                raise UserError(
                    f"{path}, line {number}: longer than {MAX_RECORD} characters: split the record"
                )
            if line.strip():
                yield number, line


def parse_json(text: str, path: pathlib.Path | str, first_line: int = 1) -> Any:
    """Parses JSON text that starts on a line of a file.

    Raises:
      UserError: malformed JSON; names file, line and column, or the record of a list.
    """
    try:
        return loads(text)
    except json.JSONDecodeError as error:
        line = first_line + error.lineno - 1
        raise UserError(
            f"{path}, line {line}: malformed JSON ({error.msg} at column {error.colno}): "
            "repair or remove it"
        ) from error
    except ValueError as error:
        is_list = text.lstrip().startswith("[")
        place = f"record {_bad_entry(text.lstrip())}" if is_list else f"line {first_line}"
        raise UserError(
            f"{path}, {place}: malformed JSON ({error}): repair or remove it"
        ) from error


def _bad_entry(text: str) -> int:
    """Returns the number of the first entry of a JSON list that `loads` refuses."""
    decoder, number, at = json.JSONDecoder(), 1, 1
    blanks = re.compile(r"[\s,]*")
    with contextlib.suppress(ValueError, RecursionError):
        while True:
            start = blanks.match(text, at).end()  # type: ignore[union-attr]
            _, at = decoder.raw_decode(text, start)
            loads(text[start:at])
            number += 1
    return number


def read_json(path: pathlib.Path | str) -> Any:
    """Reads a file that holds one JSON value."""
    return parse_json(read_text(path), path)


def read_text(path: pathlib.Path | str) -> str:
    """Reads a text file whole, plain or compressed."""
    with open_text(path, whole=True) as file:
        return _guarded(path, file.read)


def read_head(path: pathlib.Path | str) -> tuple[str, str]:
    """Returns the container of the records of a file, and its first characters.

    Returns:
      `parquet`, `list` (JSON), `lines` (JSON, or one JSON object), or the delimiter of a table; and
      the text up to the end of a line, empty for parquet.

    Raises:
      UserError: the file is missing, empty, or neither UTF-8 text nor parquet.
    """
    with open_bytes(path) as file:
        if file.peek(4)[:4] == PARQUET_MAGIC:
            return "parquet", ""
    with open_text(path, newline="\n") as lines:
        # The rest of the line completes the last record of JSON lines.
        head = _guarded(path, lambda: lines.read(HEAD_BYTES) + lines.readline(MAX_RECORD))
    opening = head.lstrip()[:1]
    if not opening:
        raise UserError(f"{path} is empty: give a file with records")
    first = head.splitlines()[0]
    if "\0" in first:
        raise UserError(
            f"{path} holds zero bytes: it is no text, such as an archive (unpack it), or UTF-16 "
            "without a byte order mark (convert it to UTF-8): give a file of text"
        )
    if opening in "[{":
        return ("list" if opening == "[" else "lines"), head
    # Spreadsheets write semicolons in the countries whose decimals have a comma.
    return next((mark for mark in "\t,;" if mark in first), ","), head


def read_records(source: Source) -> Iterator[Record]:
    """Yields the records of JSON lists, JSON lines, tables or parquet; `UserError` if malformed."""
    for path in [source] if isinstance(source, str | pathlib.Path) else source:
        container, _ = read_head(path)
        if container == "parquet":
            yield from read_parquet(path)
            continue
        if container not in ("list", "lines"):
            yield from read_table(path, container)
            continue
        if container == "list":
            values = enumerate(read_json(path), start=1)
            entries = ((f"{path}, record {n}", value) for n, value in values)
        else:
            lines = ((n, line.rstrip()) for n, line in read_lines(path))
            entries = ((f"{path}, line {n}", parse_json(line, path, n)) for n, line in lines)
        for place, value in entries:
            if not isinstance(value, dict):
                raise UserError(
                    f"{place}: holds {type(value).__name__}, not a JSON object of fields: "
                    "rewrite or remove it"
                )
            yield Record(place, value)


def read_table(path: pathlib.Path | str, delimiter: str) -> Iterator[Record]:
    """Yields the rows of a table whose first row names the columns.

    Raises:
      UserError: two columns have one name; a row has text beyond the last column, whose other cells
        may be shifted; or a quotation mark is not closed, after which all rows would be one cell.
    """
    csv.field_size_limit(MAX_RECORD)  # cells may contain whole articles
    # The csv module requires `newline=""` to keep line breaks within quoted cells.
    with open_text(path, newline="") as file:
        rows = csv.DictReader(file, delimiter=delimiter, strict=True)
        try:
            names = [name for name in _guarded(path, lambda: rows.fieldnames) or () if name.strip()]
            _refuse_repeated(path, names)
            while (row := _guarded(path, lambda: next(rows, None))) is not None:
                # `DictReader` puts surplus cells under the name None, and None into missing cells.
                fields = {name: value for name, value in row.items() if name and value is not None}
                place = f"{path}, line {rows.line_num}"
                # Empty ones are harmless: spreadsheets write them.
                if any(map(str.strip, row.get(None) or ())):
                    raise UserError(
                        f"{place}: more cells than the {len(rows.fieldnames or ())} columns: put "
                        "quotation marks around cells that contain the delimiter"
                    )
                yield Record(place, fields, is_row=True)
        except csv.Error as error:
            raise UserError(
                f"{path}: malformed table ({error}, near line {rows.line_num}): correct it"
            ) from error


def _refuse_repeated(path: pathlib.Path | str, names: Sequence[str]) -> None:
    if repeated := [name for name in names if names.count(name) > 1]:
        raise UserError(
            f"{path}: two columns are named {repeated[0]!r}, and only one could be read: rename or "
            "remove one"
        )


def read_parquet(path: pathlib.Path | str) -> Iterator[Record]:
    """Yields the rows of a parquet file lazily, from 1; `UserError` if it is damaged."""
    n = 0
    with _parquet(path) as file:
        _refuse_repeated(path, file.schema_arrow.names)
        for batch in file.iter_batches():
            try:
                rows = batch.to_pylist()
            except (OverflowError, ValueError) as error:
                for i in range(batch.num_rows):
                    _check_row(path, batch, i, n + i + 1)
                raise UserError(f"{path}: unreadable ({error}): write it again") from error
            for row in rows:
                n += 1
                yield Record(f"{path}, record {n}", row)


def _check_row(path: pathlib.Path | str, batch: Any, row: int, number: int) -> None:
    """Raises `UserError` for a row of which Python cannot hold a value, such as a late date."""
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            column[row].as_py()
        except (OverflowError, ValueError) as error:
            raise UserError(
                f"{path}, record {number}: field {name!r} holds a {column.type} that cannot be "
                f"read ({error}): write it as text, or leave the column out"
            ) from error


def parquet_columns(path: pathlib.Path | str) -> list[str]:
    """Returns the names of the columns of a parquet file; errors as `read_parquet`."""
    with _parquet(path) as file:
        return list(file.schema_arrow.names)


@contextlib.contextmanager
def _parquet(path: pathlib.Path | str) -> Iterator[Any]:
    import pyarrow
    import pyarrow.parquet  # here, because it takes half a second

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            yield file
    # Damage also ends in texts that are not UTF-8, and in numbers beyond any type.
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError, OverflowError) as error:
        raise UserError(f"{path}: damaged parquet file ({error}): copy it again") from error


def field(record: Record, name: str, kind: type[T]) -> T:
    """Returns a required field of a record, of the type `kind` (`object`: any).

    A list or an object may be a text in JSON or as Python writes it, because a table, and some
    columns of parquet, hold texts only.

    Raises:
      UserError: the field is missing or of another type; names file, line and field.
    """
    if name not in record.fields:
        present = ", ".join(map(str, record.fields)) or "none"
        raise UserError(f"{record.place}: field {name!r} is missing (fields: {present}): add it")
    value = record.fields[name]
    if isinstance(value, str) and issubclass(kind, list | dict):
        value = _value_in(value, record.place, name)
    if not isinstance(value, kind):
        raise UserError(_of_another_type(record.place, name, value, kind.__name__))
    return value


def _of_another_type(place: str, name: str, value: Any, expected: str) -> str:
    kind = "null" if value is None else type(value).__name__
    return (
        f"{place}: field {name!r} holds {kind}, expected {expected}, but it is "
        f"{reprlib.repr(value)}: rewrite it"
    )


def _value_in(text: str, place: str, name: str) -> Any:
    """Returns the list or object that a text is in JSON or Python; any other text as it is."""
    if not text.lstrip().startswith(("[", "{", "(", "array(")):
        return text
    try:
        return loads(text)
    except json.JSONDecodeError:
        pass
    except ValueError as error:
        raise UserError(
            f"{place}: field {name!r} holds malformed JSON ({error}): repair or remove it"
        ) from error
    # Python joins texts without a comma: "['a' 'b']" would be ['ab'].
    is_quoted = re.match(r"""\s*\[\s*['"]""", text) and re.search(r"""['"]\s*\]\s*\Z""", text[-99:])
    if NUMPY.match(text) or (is_quoted and ADJACENT_TEXTS.search(text)):
        raise UserError(
            f"{place}: field {name!r} holds an array as NumPy prints it, {text[:60]!r}: write a "
            "list in JSON, as `json.dumps(list(array))` does"
        )
    with contextlib.suppress(ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        value = ast.literal_eval(text.strip())
        # Not the tuple that "['a'], 'b'" is to Python.
        if isinstance(value, {"[": list, "(": tuple, "{": dict | set}[text.lstrip()[0]]):
            return value
    return text  # that begins with a bracket, such as "[sic] ..."


def _text_of(value: Any, place: str, name: str) -> str:
    """Returns a text or a whole number as text; see `text`."""
    if isinstance(value, str):
        return value
    # Tables turn a column of integers into floats if one is missing; above 2^53 digits are lost.
    if isinstance(value, float) and value.is_integer() and abs(value) <= 2**53:
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    raise UserError(_of_another_type(place, name, value, "str or a whole number"))


def text(record: Record, name: str) -> str:
    """Returns a required field, a text or a whole number (`1997.0` is 1997), as text.

    Raises:
      UserError: the field is missing, or holds another value; names file, line, field and value.
    """
    return _text_of(field(record, name, object), record.place, name)


def optional_text(record: Record, name: str, default: str = "") -> str:
    """Returns a field as `text` does; the default if it is missing, null or blank."""
    value = record.fields.get(name)
    is_given = value is not None and not (isinstance(value, str) and not value.strip())
    return _text_of(value, record.place, name) if is_given else default


def question_text(record: Record, name: str) -> str:
    """Returns the text of a question; raises `UserError` as `text`, and if it is blank."""
    question = text(record, name)
    if not question.strip():
        raise UserError(f"{record.place}: the question in {name!r} is empty: add it or remove it")
    return question


def texts(record: Record, name: str, *, are_answers: bool = False) -> tuple[str, ...]:
    """Returns a required field, a list or a single value, as texts.

    A text may be a list in JSON or as Python writes it. An empty one and a null mean that there is
    nothing. Of answers (`are_answers`) a boolean is yes or no, as in BoolQ and StrategyQA, and
    numbers in brackets may be one: an interval, a set.

    Raises:
      UserError: the field is missing; an entry is blank, or neither text nor whole number; or a
        cell of a table may be either a list of numbers or one answer.
    """
    value = field(record, name, object)
    place = record.place
    if isinstance(value, str) and not value.strip():
        return ()
    if isinstance(value, str):
        if are_answers and NUMBERS.fullmatch(value):
            # A file that has lists would have one here.
            if not record.is_row or not ("," in value or value.lstrip()[0] == "["):
                return (value,)
            raise UserError(
                f"{place}: field {name!r} holds {value[:60]!r}, a list of numbers or one answer: "
                "write a list of texts in JSON, with each number, or the answer, in quotation marks"
            )
        value = _value_in(value, place, name)
        if isinstance(value, list | tuple):
            # A number within a text is a text already.
            value = [repr(x) if isinstance(x, float) and 0 < x % 1 < 1 else x for x in value]
    if value is None:
        return ()
    entries = []
    for entry in value if isinstance(value, list | tuple) else [value]:
        if entry is None:
            raise UserError(f"{place}: field {name!r} has a null in its list: remove it")
        if are_answers and isinstance(entry, bool):
            entry = "yes" if entry else "no"
        entries.append(_text_of(entry, place, name))
        if not entries[-1].strip():
            raise UserError(f"{place}: field {name!r} has an empty text in its list: remove it")
    return tuple(entries)


def answers(record: Record, name: str) -> tuple[str, ...]:
    """Returns all correct answers of a question, with those of `answer_aliases`, as in MuSiQue.

    The field is as for `texts`; or an object with a value and aliases, as in TriviaQA, or with a
    list of texts, as in SQuAD.

    Raises:
      UserError: as `texts`; or the record says that its question has no answer.
    """
    if str(record.fields.get("answerable", True)).lower() == "false":
        raise UserError(
            f"{record.place}: the question has no answer ('answerable' is false): remove such "
            "records, because a reward needs an answer"
        )
    value = field(record, name, object)
    if isinstance(value, str) and value.lstrip().startswith("{"):
        value = _value_in(value, record.place, name)
    if not isinstance(value, dict):
        found = texts(record, name, are_answers=True)
    else:
        at = Record(f"{record.place}, {name}", {key.lower(): x for key, x in value.items()})
        if "value" in at.fields:
            aliases_too = texts(at, "aliases", are_answers=True) if "aliases" in at.fields else ()
            found = unique((*texts(at, "value", are_answers=True), *aliases_too))
        elif "text" in at.fields:
            found = unique(texts(at, "text", are_answers=True))
        else:
            raise UserError(_of_another_type(record.place, name, value, "text or a list of texts"))
    if "answer_aliases" not in record.fields:
        return found
    return unique((*found, *texts(record, "answer_aliases", are_answers=True)))


def as_list(record: Record, name: str) -> list[Any]:
    """Returns a required list field; the Hub stores a list of objects also as columns of lists."""
    value = field(record, name, object)
    if isinstance(value, str):
        value = _value_in(value, record.place, name)
    if isinstance(value, dict) and value:
        columns = list(value.values())
        if all(isinstance(c, list) and len(c) == len(columns[0]) for c in columns):
            return [dict(zip(value, row, strict=True)) for row in zip(*columns, strict=True)]
    if not isinstance(value, list):
        raise UserError(_of_another_type(record.place, name, value, "list"))
    return value


def parts(record: Record, name: str) -> Iterator[Record]:
    """Yields the objects of a required list field, see `as_list`, each with its place."""
    for n, entry in enumerate(as_list(record, name), start=1):
        place = f"{record.place}, {name} {n}"
        if not isinstance(entry, dict):
            raise UserError(f"{place}: holds {type(entry).__name__}, not an object of fields")
        yield Record(place, entry)


def others(record: Record, *names: str) -> dict[str, Any]:
    """Returns the fields of a record other than `names`: a question's metadata."""
    return {name: value for name, value in record.fields.items() if name not in names}


def unique(names: Iterable[str]) -> tuple[str, ...]:
    """Removes duplicates; keeps the order of first appearance."""
    return tuple(dict.fromkeys(names))


def joined(record: Record, name: str) -> str:
    """Returns a required field as text, a list of sentences joined by one space."""
    value = field(record, name, object)
    if not isinstance(value, list):
        return text(record, name)
    sentences = (_text_of(sentence, record.place, name).strip() for sentence in value)
    return " ".join(filter(None, sentences))
