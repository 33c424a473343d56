"""Generated input at the borders: files, model folders, configs and requests.

Each is accepted, or refused with a `UserError` or a status below 500. Nothing else is raised, and
no input takes long. More examples than here: HYPOTHESIS_EXAMPLES=2000.
"""

import contextlib
import csv
import functools
import gzip
import io
import json
import os
import pathlib
import shutil
import struct
import warnings
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jax_ragrl.config.shipped_configs import config_path
from jax_ragrl.corpus.formats import FORMATS, load_passages, load_questions
from jax_ragrl.corpus.formats.html_text import html_sections
from jax_ragrl.errors import UserError
from jax_ragrl.models import safetensors_io
from jax_ragrl.models.hf import load_decoder, read_config
from jax_ragrl.models.hf_config import from_hf
from jax_ragrl.run.load import load_job
from jax_ragrl.run.overrides import load_config
from jax_ragrl.text.tokenizer import ChatTokenizer
from tests.corpus.test_documents import pdf
from tests.rollout.tape import Tape
from tests.serve.test_serve import answer_text, client
from tests.tiny import tokenizer

GOLDEN = pathlib.Path(__file__).parent / "models" / "golden" / "qwen3"
EXAMPLES = int(os.environ.get("HYPOTHESIS_EXAMPLES", "0"))
NUMBERS = st.integers(-(2**70), 2**70) | st.floats() | st.sampled_from([0, 1, -1, 2**31, 2**63])
SCALARS = st.none() | st.booleans() | NUMBERS | st.text(max_size=8)
VALUES = st.recursive(
    SCALARS,
    lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=6), x, max_size=3),
    max_leaves=8,
)


def examples(count: int) -> settings:
    """The number of examples, all in the folder of one test."""
    return settings(
        max_examples=EXAMPLES or count,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )


@contextlib.contextmanager
def refusing() -> Iterator[None]:
    """Lets errors for the user pass, and no others."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with contextlib.suppress(UserError):
            yield


def read_or_refuse(file: pathlib.Path) -> None:
    for load in (load_questions, load_passages):
        with refusing():
            load(file)


FIELDS = st.sampled_from(
    "_id id question query answer answers text title contents context docs golden_answers metadata "
    "reward_model ground_truth extra_info supporting_facts paragraphs ctxs positive_ctxs".split()
)
RECORDS = st.dictionaries(FIELDS, VALUES, max_size=6) | VALUES
SUFFIXES = st.sampled_from(
    "jsonl json tsv csv txt parquet gz jsonl.gz html md pdf docx zip tar.gz".split()
)


def lines(records: list[Any]) -> bytes:
    return "\n".join(map(json.dumps, records)).encode("utf-8", "surrogatepass")


CONTENTS = (
    st.binary(max_size=200)
    | st.text(max_size=200).map(lambda text: text.encode("utf-8", "replace"))
    | st.lists(RECORDS, max_size=4).map(lines)
    | st.lists(RECORDS, max_size=4).map(lambda records: json.dumps(records).encode())
    | st.lists(RECORDS, max_size=4).map(lambda records: gzip.compress(lines(records)))
    | st.lists(RECORDS, max_size=2).map(lambda records: gzip.compress(lines(records))[:-9])
)


@examples(300)
@given(CONTENTS, SUFFIXES, st.sampled_from([*FORMATS]))
def test_any_file_is_read_or_refused(tmp_path, content, suffix, form):
    file = tmp_path / f"data.{suffix}"
    file.write_bytes(content)
    read_or_refuse(file)
    with refusing():
        list(map(list, FORMATS[form].read([file])))


HTML = st.lists(
    st.sampled_from(
        "< > <!-- --> <![ <a </ /> ' \" = & &# ; <p> <h1> </h1> <script> <svg> a".split()
    )
    | st.text(max_size=3),
    max_size=30,
).map("".join)


@examples(300)
@given(HTML)
def test_any_page_has_sections(page):
    """The words that no markup can hide are in one of them."""
    (first, *_, last) = html_sections(f"begin<p>{page}x\"'>--></script></svg><h1>end</h1>")
    assert first.text.startswith("begin") and last.heading.endswith("end")


@examples(300)
@given(st.lists(st.tuples(st.integers(0, 600), st.binary(min_size=1, max_size=4)), max_size=3))
def test_any_pdf_is_read_or_refused(tmp_path, changes):
    pytest.importorskip("pypdf")
    content = bytearray(pdf(["first page", "second page"]))
    for at, value in changes:
        content[at : at + len(value)] = value
    (tmp_path / "a.pdf").write_bytes(content)
    with refusing():
        load_passages(tmp_path / "a.pdf")


CELLS = st.text("ab,;\t\"'[]{}()0123\n\0é ", max_size=12) | VALUES.map(json.dumps)


@examples(150)
@given(
    st.lists(st.lists(FIELDS | CELLS, min_size=1, max_size=4), max_size=4),
    st.sampled_from(",;\t"),
    st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "latin-1"]),
    st.sampled_from([csv.QUOTE_ALL, csv.QUOTE_MINIMAL, None]),
)
def test_any_table_is_read_or_refused(tmp_path, rows, delimiter, encoding, quoting):
    text = io.StringIO()
    if quoting is None:
        text.write("\n".join(delimiter.join(row) for row in rows))
    else:
        csv.writer(text, delimiter=delimiter, quoting=quoting, escapechar="\\").writerows(rows)
    file = tmp_path / "table"
    file.write_bytes(text.getvalue().encode(encoding, "replace"))
    read_or_refuse(file)


@functools.cache
def parquet_bytes() -> bytes:
    """Columns of the types that published sets have, and of some that Python cannot hold."""
    columns = {
        "question": ["q?", "r?"],
        "answer": [["a"], ["b", None]],
        "text": [b"a", b"b"],
        "metadata": [{"gold": ["a"], "x": 1.5}, None],
        "day": pyarrow.array([1, 2], pyarrow.date32()),
        "time": pyarrow.array([1, 2], pyarrow.timestamp("ns")),
    }
    sink = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), sink, compression="none")
    return sink.getvalue()


@examples(100)
@given(st.integers(0, 10**6), st.binary(min_size=1, max_size=4), st.booleans())
def test_any_parquet_is_read_or_refused(tmp_path, at, new, is_cut):
    content = bytearray(parquet_bytes())
    at %= len(content)
    content[at:] = new + (b"" if is_cut else content[at + len(new) :])
    file = tmp_path / "x.parquet"
    file.write_bytes(content)
    read_or_refuse(file)


@functools.cache
def golden_config() -> dict[str, Any]:
    return json.loads((GOLDEN / "config.json").read_text(encoding="utf-8"))


@examples(300)
@given(st.dictionaries(st.sampled_from(sorted(golden_config())), VALUES, min_size=1, max_size=3))
def test_any_config_of_a_model_is_read_or_refused(changes):
    with refusing():
        from_hf(golden_config() | changes)


NAMES = st.sampled_from(
    ["model-1.safetensors", "../x", "/", "", ".", "x" * 5000, "é" * 200, "\x00"]
)


@examples(200)
@given(st.dictionaries(st.sampled_from(["a", "b", "lm_head.weight"]), NAMES | VALUES) | VALUES)
def test_any_index_of_weights_is_read_or_refused(tmp_path, weight_map):
    """One shard exists; the index may name tensors that it lacks."""
    shutil.copy(GOLDEN / "model.safetensors", tmp_path / "model-1.safetensors")
    (tmp_path / safetensors_io.INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with refusing():
        for name, file in safetensors_io.locate(tmp_path).items():
            safetensors_io.read(file, name, (slice(None),))


TENSOR = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "BF16", "X", 3]),
        "shape": st.lists(NUMBERS, max_size=2) | VALUES,
        "data_offsets": st.lists(NUMBERS, max_size=3) | VALUES,
    },
)


@examples(200)
@given(VALUES | st.dictionaries(st.text(max_size=4), TENSOR, max_size=2), st.binary(max_size=32))
def test_any_header_of_weights_is_read_or_refused(tmp_path, header, rest):
    text = json.dumps(header).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(text)) + text + rest)
    with refusing():
        for name in safetensors_io.shapes_of(file):
            safetensors_io.read(file, name, (slice(None),))


@examples(100)
@given(st.sampled_from(["tokenizer.json", "tokenizer_config.json", "config.json"]), VALUES)
def test_any_description_in_a_folder_is_read_or_refused(tmp_path, name, value):
    tokenizer().save(tmp_path)
    shutil.copy(GOLDEN / "config.json", tmp_path)
    (tmp_path / name).write_text(json.dumps(value))
    with refusing():
        ChatTokenizer.load(tmp_path)
    with refusing():
        read_config(tmp_path)


def keys_of(values: dict[str, Any], prefix: str = "") -> list[str]:
    """All keys of nested values, of sections too."""
    names = []
    for key, value in values.items():
        names += [
            prefix + key,
            *(keys_of(value, f"{prefix}{key}.") if isinstance(value, dict) else []),
        ]
    return names


@functools.cache
def shipped(name: str) -> tuple[str, tuple[str, ...]]:
    file = f"--config={config_path(f'configs/tiny/{name}.py')}"
    return file, tuple(keys_of(load_config(None, [file])))


LITERALS = VALUES.map(repr) | st.text(max_size=8)


@examples(150)
@given(st.data())
def test_any_override_of_a_config_is_taken_or_refused(data):
    file, names = shipped(data.draw(st.sampled_from(["c3po", "search_r1", "coda", "opera"])))
    key = st.sampled_from(names) | st.text("abc._/=-", max_size=8)
    overrides = data.draw(st.lists(st.tuples(key, LITERALS), min_size=1, max_size=2))
    with refusing():
        load_job(load_config(None, [file, *(f"--config.{k}={v}" for k, v in overrides)]))


PATHS = ("/answer", "/retrieve", "/v1/chat/completions")
BODY_FIELDS = st.sampled_from(
    "question questions queries query topk return_scores stream n model messages trace seed "
    "temperature max_tokens role content".split()
)
BODIES = st.dictionaries(BODY_FIELDS, VALUES, max_size=5) | VALUES


@pytest.fixture(scope="module")
def http() -> Iterator[Any]:
    with client(Tape(answer_text)) as http:
        yield http


@examples(200)
@given(
    st.sampled_from(PATHS),
    BODIES.map(lambda body: json.dumps(body).encode()) | st.binary(max_size=60),
)
def test_any_request_is_answered_or_refused(http, path, body):
    """An exception in the server would be raised here by its client."""
    reply = http.post(path, content=body, headers={"Content-Type": "application/json"})
    assert reply.status_code < 500, (reply.status_code, reply.text[:200])


@examples(60)
@given(st.text(max_size=20), st.sampled_from(["GET", "POST", "PUT", "HEAD", "DELETE"]))
def test_any_address_is_answered_or_refused(http, path, method):
    assert http.request(method, f"/{quote(path)}").status_code < 500


@examples(60)
@given(st.data())
def test_a_changed_model_folder_is_loaded_or_refused(tmp_path, data):
    """One file of the folder has other bytes, another header or another end."""
    shutil.copytree(GOLDEN, tmp_path, dirs_exist_ok=True)
    name = data.draw(st.sampled_from(["config.json", "model.safetensors"]))
    content = bytearray((GOLDEN / name).read_bytes())
    at = data.draw(st.integers(0, min(len(content), 3000) - 1))
    new = data.draw(st.binary(min_size=1, max_size=4))
    kind = data.draw(st.sampled_from(["replace", "cut", "insert"]))
    if kind == "cut":
        del content[at:]
    else:
        content[at : at + len(new) * (kind == "replace")] = new
    (tmp_path / name).write_bytes(content)
    with refusing():
        load_decoder(tmp_path)
