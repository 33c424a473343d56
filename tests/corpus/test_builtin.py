"""Laws of the packaged data: names resolve, splits are disjoint, and gold is in the corpus."""

import dataclasses
import functools
import gzip
import hashlib

import pytest

from jax_ragrl.cli.main import CONFIGS, load_config
from jax_ragrl.corpus.data_path import SETS, data_file
from jax_ragrl.corpus.formats import load_questions
from jax_ragrl.corpus.mixture import load_mixture
from jax_ragrl.errors import UserError
from jax_ragrl.llm.base import MeteredReply
from jax_ragrl.run.load import load_job
from jax_ragrl.run.models import load_llm
from jax_ragrl.sampling.sampler import Shapes
from jax_ragrl.systems.baselines.script import GREEDY
from jax_ragrl.text.prompts import user_turn
from jax_ragrl.types import LLMRequest

# Of the uncompressed files: recorded replies and results belong to these questions and passages.
# It was checked for these files that every gold passage is in its corpus, that no question is in
# two splits nor one that is trained on near a tested one, that test questions of nq are none of the
# mixture's trained ones, and that its first 80 hold every kind.
HASHES = {
    "nq:corpus": "9181f9fb7bb0f77a3fcd5b957a21b6a1e124f9f3e05f367d8dc2bc06e2dadb67",
    "nq:train": "632a7d1d12d9c9a8fae26a6aa9dbf416fdd5fc16005d5b826a734168e908a2c7",
    "nq:dev": "b267bb8cf6c6788fc23419a824f2e07e20b3c6a4acda4ab94dfcd93e1c54c681",
    "nq:test": "b2a6e7e3a09a7a67946bff93d909080f7d1e4a2efbf9b595c2f163e83b21ac3b",
    "mixture:corpus": "d847c718a43929fb1f466816bc03812d1ed76c03e0f711c6f7f608124adba303",
    "mixture:train": "fc8ec217407707a935c114a4ed4a40a186f9e1aeadc7ce04d3ee01a6efecc793",
    "mixture:dev": "63cd306c5048949d92ed79b6b067aef3fc203b4d58797822ea93b25a98eaed3d",
    "mixture:test": "0f69a7fc38791859ec2aed07e9ede9374b6501ef7cd7772484fc4a0d47e97649",
    "musique:corpus": "1c6129514a3268bfc5201ab5b35903025f7e5be97cc9424408894942134bac58",
    "musique:test": "3a6e72bf3da129c2c8c84eefd9ca505c5afd6fd56f8cc1947be133ee458fbcdc",
}


@functools.cache
def questions_of(name):
    return load_questions(data_file(name))


def test_every_name_is_a_file_that_was_recorded():
    names = {f"{name}:{file}" for name, files in SETS.items() for file in files}
    assert names - {*HASHES} == {"mixture:replies"} and data_file("mixture:replies").is_file()


@pytest.mark.parametrize("name", HASHES)
def test_the_files_are_those_that_were_recorded(name):
    assert hashlib.sha256(gzip.decompress(data_file(name).read_bytes())).hexdigest() == HASHES[name]


def test_the_recorded_replies_answer_the_present_prompts():
    """A letter of another prompt would leave them unused, and every request would be sent."""
    llm = load_job(load_config(CONFIGS / "real" / "mao_arag.py", [])).llm
    assert llm.replies == "mixture:replies"
    reader = load_llm(dataclasses.replace(llm, replies_only=True), None, "", Shapes())
    questions = questions_of("mixture:dev")
    chained = next(q for q in questions if q.kind == "hotpotqa bridge")
    asked = [
        ("c3po_real", "answer_direct", questions[0]),
        ("mao_arag_real", "answer_direct", questions[0]),
        ("mao_arag_real", "decompose_serial", chained),
    ]
    requests = [
        LLMRequest(name, user_turn(style, name, question=q.text), GREEDY)
        for style, name, q in asked
    ]
    replies = reader.complete(requests)  # an error without a recorded reply
    assert all(isinstance(reply, MeteredReply) for reply in replies) and replies[0] == replies[1]


def test_a_name_is_accepted_where_a_question_file_is():
    assert [q.id for q in load_mixture("nq:dev")][:2] == ["dev0", "dev1"]


@pytest.mark.parametrize(
    ("name", "hint"), [("nq:validation", "nq:test"), ("musique:train", ":test")]
)
def test_an_unknown_name_names_those_that_exist(name, hint):
    with pytest.raises(UserError, match=hint):
        data_file(name)
