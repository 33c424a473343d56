"""Whatever a server sends is a value of its request, or the failure of this request alone."""

import encodings.aliases
import gzip
import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jax_ragrl.errors import EffectError
from jax_ragrl.runtime.servers import take_counts
from jax_ragrl.types import Hits
from tests.faults import sending
from tests.runtime.test_servers import CLIENTS, answers
from tests.test_fuzz import VALUES, examples

CODECS = sorted({*encodings.aliases.aliases, "undefined", "idna", "punycode", "no codec", "\u00e9"})
STATUSES = [*[200] * 4, 201, 204, 301, 302, 303, 307, 308, 400, 404, 429, 500, 503, 600, 999]
PLACES = [
    *("http://127.0.0.1:99999999/", "http://[", "http://a..b/", "gopher://x/", "//", "http://:0/"),
    *(
        "http://x:y/",
        "http://" + "a" * 300,
        "http://\u00df\u2603/",
        "/",
        "http://127.0.0.1:1/",
        "x:",
    ),
]
HEADERS = (
    st.sampled_from(CODECS).map(lambda codec: ("Content-Type", f"text/html; charset={codec}"))
    | st.sampled_from(PLACES).map(lambda place: ("Location", place))
    | st.sampled_from("gzip deflate br zstd gzip,gzip identity x".split()).map(
        lambda name: ("Content-Encoding", name)
    )
    | st.tuples(
        st.sampled_from(["Retry-After", "Set-Cookie", "Content-Type", "X-Request-Id", "Date"]),
        st.text(st.characters(min_codepoint=32, max_codepoint=255), max_size=30),
    )
)
NUMBERS = st.sampled_from(["1", "-0.0", "1e999", "NaN", "9" * 400, "-" + "9" * 5000, "true", '"1"'])
NAMES = st.sampled_from(
    "choices message content text usage prompt_tokens completion_tokens result document score id "
    "contents title organic link snippet error".split()
)
FORMS = [
    '{"choices": [{"message": {"content": %s}}], "usage": {"prompt_tokens": %s}}',
    '{"result": [[{"document": {"id": %s, "contents": "x"}, "score": %s}], []]}',
    '{"result": [[{"document": {"title": %s, "contents": %s}}], %s]}',
    '{"organic": [{"link": %s, "title": %s, "snippet": "x"}]}',
    '{"error": %s}',
]
DEEP = ["[" * 5000, '{"a":' * 5000, "[" * 5000 + "]" * 5000]


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    """JSON that is almost of the right form, other JSON, or bytes."""
    kind = draw(st.integers(0, 3))
    if kind == 0:
        form = draw(st.sampled_from(FORMS))
        while "%s" in form:
            part = draw(NUMBERS | st.sampled_from(DEEP) | VALUES.map(json.dumps))
            form = form.replace("%s", part, 1)
        return form.encode()
    if kind == 1:
        value = draw(st.dictionaries(NAMES, VALUES, max_size=3) | VALUES)
        return json.dumps(value).encode(draw(st.sampled_from(["utf-8", "utf-16", "utf-32"])))
    body = draw(st.binary(max_size=40) | st.sampled_from(DEEP).map(str.encode))
    return gzip.compress(body)[: draw(st.integers(0, 60))] if kind == 2 else body


@pytest.fixture(scope="module")
def server():
    """An address, and the reply that it sends."""
    reply = [b""]
    with sending(lambda number: [reply[0]]) as (address, _):
        yield address, reply


@pytest.mark.slow
@pytest.mark.parametrize("client", CLIENTS)
@examples(60)
@given(st.sampled_from(STATUSES), st.lists(HEADERS, max_size=3), bodies())
@example(404, [("Content-Type", "text/html; charset=utf-16")], b"odd")
@example(200, [("Content-Type", "text/html; charset=undefined")], b"odd")
@example(
    200, [], b'{"result": [[{"document": {"contents": "x"}, "score": %s}], []]}' % (b"9" * 400)
)
@example(302, [("Location", "http://127.0.0.1:99999999/")], b"")
def test_any_reply_is_a_value_or_the_failure_of_its_request(server, client, status, headers, body):
    address, reply = server
    lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(body)}", "Connection: close"]
    lines += [f"{name}: {value}" for name, value in headers]
    reply[0] = "\r\n".join([*lines, "", ""]).encode("latin-1", "replace") + body
    results = answers(client, address, "ab", 3, retries=0, timeout=5.0)
    assert len(results) == 2
    for result in results:
        assert isinstance(result, EffectError | (str if client == "llm" else Hits))
        assert str(result).isprintable() or not isinstance(result, EffectError)
    take_counts()


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_no_redirect_is_followed_and_the_failure_names_the_new_address(client, status):
    """Another host would get the prompts."""
    with sending(lambda number: [b""]) as (elsewhere, stolen):
        reply = f"HTTP/1.1 {status} X\r\nContent-Length: 0\r\nLocation: {elsewhere}/a\r\n\r\n"
        with sending(lambda number: [reply.encode()]) as (address, _):
            for result in answers(client, address, "ab", 3, retries=0):
                assert isinstance(result, EffectError) and f"{elsewhere}/a" in str(result)
    assert not stolen
