"""Data files by name: paths, and files of data sets on the Hub."""

import json
import pathlib

import pytest

from jax_ragrl.corpus.data_path import data_path, set_name
from jax_ragrl.errors import UserError
from jax_ragrl.evaluation.suite import FILES
from jax_ragrl.runtime.hub import DataFile, parse_data_file
from tests.hub_server import COMMIT, run_with_hub, serving

NAME = "hf://datasets/owner/set"


@pytest.mark.parametrize(
    ("rest", "revision", "path"),
    [
        ("/train.jsonl", None, "train.jsonl"),
        ("@v1/nq/train.jsonl", "v1", "nq/train.jsonl"),
        ("@refs/convert/parquet/default/train/0.parquet", "refs/convert/parquet",
         "default/train/0.parquet"),
        ("@refs/pr/3/a b.jsonl", "refs/pr/3", "a b.jsonl"),
        ("@feature%2Fx/a.jsonl", "feature/x", "a.jsonl"),
    ],
)  # fmt: skip
def test_an_address_has_the_form_of_fsspec(rest, revision, path):
    expected = DataFile("owner/set", path, revision)
    assert parse_data_file(NAME + rest) == expected
    # `pathlib`, which types of options may apply, merges slashes.
    assert parse_data_file(pathlib.Path(NAME + rest)) == expected


@pytest.mark.parametrize(
    "name", ["hf://owner/set/x", NAME, f"{NAME}/", f"{NAME}@v1", f"{NAME}/folder/", "hf://"]
)
def test_another_address_is_refused_with_the_form(name):
    with pytest.raises(UserError, match="write hf://datasets/OWNER/NAME/PATH, or hf://datasets"):
        data_path(name)
    with pytest.raises(UserError, match=r"the Hub can have no data set .*: correct the path or"):
        data_path("hf://datasets/owner/a--b/train.jsonl")


def test_paths_stay_paths_and_a_bucket_is_refused(tmp_path):
    assert data_path(str(tmp_path / "x.jsonl")) == tmp_path / "x.jsonl"
    with pytest.raises(UserError, match="mount the bucket"):
        data_path("gs://bucket/x.jsonl")
    assert str(data_path("a.jsonl, nq:corpus")).startswith("a.jsonl,/")
    (tmp_path / "a,b.jsonl").write_text("")
    assert data_path(tmp_path / "a,b.jsonl") == tmp_path / "a,b.jsonl"


@pytest.mark.parametrize(
    ("rest", "name"),
    [
        ("/nq/train.jsonl", "nq"),
        ("/train.jsonl", "set"),
        ("/data/train-00000-of-00004.parquet", "set"),
        ("@v1/hotpotqa/dev.jsonl.gz", "hotpotqa"),
        ("/nq_open.jsonl", "nq_open"),
    ],
)
def test_the_name_of_a_set_never_depends_on_the_cache(rest, name):
    assert set_name(NAME + rest) == name


@pytest.mark.parametrize(
    ("text", "questions", "corpus"),
    [
        ("a.jsonl", "a.jsonl", None),
        ("a.jsonl@b.jsonl", "a.jsonl", "b.jsonl"),
        (f"{NAME}/a.jsonl", f"{NAME}/a.jsonl", None),
        (f"{NAME}/a.jsonl@b.jsonl", f"{NAME}/a.jsonl", "b.jsonl"),
        (f"{NAME}@v1/a.jsonl@b.jsonl", f"{NAME}@v1/a.jsonl", "b.jsonl"),
        (f"{NAME}@refs/pr/3/a.jsonl@{NAME}@v1/b", f"{NAME}@refs/pr/3/a.jsonl", f"{NAME}@v1/b"),
    ],
)
def test_questions_and_corpus_of_a_table_may_have_revisions(text, questions, corpus):
    match = FILES.fullmatch(text)
    assert (match["questions"], match["corpus"]) == (questions, corpus)


SCRIPT = """
import json, sys
from jax_ragrl.corpus.formats import load_passages
from jax_ragrl.corpus.data_path import data_path
from jax_ragrl.corpus.mixture import load_mixture
from jax_ragrl.errors import UserError
try:
    ids = [question.id for question in load_mixture(sys.argv[1])]
    print(json.dumps([ids, len(load_passages(data_path(sys.argv[2])))]))
except UserError as error:
    sys.exit(f"error: {error}")
"""


@pytest.fixture
def repository(tmp_path) -> pathlib.Path:
    """A data set with two sets of questions and a corpus."""
    folder = tmp_path / "repository"
    for name in ("nq", "hotpotqa"):
        (folder / name).mkdir(parents=True)
        row = {"id": "test_0", "question": "Who?", "golden_answers": ["x"], "metadata": {}}
        (folder / name / "test.jsonl").write_text(json.dumps(row))
    passage = {"id": "0", "contents": '"Title"\ntext'}
    (folder / "corpus.jsonl").write_text(json.dumps(passage))
    return folder


def read(questions: str, corpus: str, home: pathlib.Path, url: str, **environ: str):
    return run_with_hub(["-c", SCRIPT, questions, corpus], home, url, **environ)


def test_questions_and_a_corpus_are_downloaded_once(repository, tmp_path):
    questions = f"{NAME}/nq/test.jsonl, {NAME}@{COMMIT}/hotpotqa/test.jsonl"
    with serving({"datasets/owner/set": repository}) as server:
        done = read(questions, f"{NAME}@main/corpus.jsonl", tmp_path / "home", server.url)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout) == [["nq/test_0", "hotpotqa/test_0"], 1]
        server.requests.clear()
        again = read(questions, f"{NAME}@main/corpus.jsonl", tmp_path / "home", server.url)
        assert again.stdout == done.stdout and server.requests == []
    offline = read(
        questions, f"{NAME}/corpus.jsonl", tmp_path / "home", server.url, HF_HUB_OFFLINE="1"
    )
    assert offline.stdout == done.stdout


FAILURES = """
import sys, time
time.sleep = lambda seconds: None  # of the retries of the Hub's client
from jax_ragrl.corpus.data_path import data_path
from jax_ragrl.errors import UserError
for name in sys.argv[1:]:
    try:
        print(data_path(name))
    except UserError as error:
        print(f"error: {error}")
"""
NO_FILE = f"{NAME}/absent.jsonl"


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        (
            {},
            {
                NO_FILE: "owner/set on the Hub has no file 'absent.jsonl': choose one listed at",
                f"{NAME}@v9/nq/test.jsonl": "owner/set on the Hub has no revision 'v9': give a",
                "hf://datasets/owner/no/a.jsonl": "error: there is no data set 'owner/no' on http",
                "hf://datasets/owner/gated/a.jsonl": "owner/gated is gated: ask for access at http",
            },
        ),
        ({"HF_HUB_OFFLINE": "1"}, {NO_FILE: "or run 'hf download --repo-type dataset owner/set'"}),
        ({"HF_ENDPOINT": "http://127.0.0.1:9"}, {NO_FILE: "check the name and the network, or"}),
    ],
)
def test_a_failed_download_says_why_on_one_line(environ, words, repository, tmp_path):
    folders = {f"datasets/owner/{set_}": repository for set_ in ("set", "gated")}
    with serving(folders, gated=("datasets/owner/gated",)) as server:
        done = run_with_hub(["-c", FAILURES, *words], tmp_path / "home", server.url, **environ)
    lines = done.stdout.splitlines()
    assert len(lines) == len(words), done.stderr
    for line, expected in zip(lines, words.values(), strict=True):
        assert line.startswith("error: ") and expected in line
