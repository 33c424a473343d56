"""Chat templates are code of others: they end, stay small, and fail with an error of one line."""

import pytest

from jax_ragrl.errors import UserError
from jax_ragrl.text import chat_template
from jax_ragrl.text.chat_template import render

MESSAGES = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Ann"}]


def rendered(source: str) -> str:
    return render(source, {"messages": MESSAGES, "add_generation_prompt": True, "tools": None})


LOOP = "{% for i in range(99999) %}"
GROW = "{% set n = namespace(s='ab') %}{% for i in range(60) %}{% set n.s = GROWN %}{% endfor %}"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",  # SecurityError
        "{{ messages.pop() }}",
        "{% for m in messages %}{{ m.role }",  # TemplateSyntaxError
        "{% for x in messages recursive %}{{ loop(messages) }}{% endfor %}",
        "{{ x.y.z }}",  # UndefinedError
        "{{ 1 + 'a' }}",  # TypeError
        "{{ range(10**9) }}",  # OverflowError
        "{% for i in range(200000) %}{% endfor %}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",  # RecursionError
        f"{{{{ {'(' * 5000}1{')' * 5000} }}}}",
        "{{ 'abc' | map('nothing') | list }}",
        "{% include 'other' %}",
        "{{ raise_exception('System role not supported') }}",
    ],
)
def test_any_failure_of_a_template_is_an_error_of_the_user(source):
    with pytest.raises(UserError, match=r"chat template .*: .*"):
        rendered(source)


@pytest.mark.parametrize(
    "source",
    [
        LOOP * 3 + "{% endfor %}" * 3,
        LOOP + "{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
        "".join(f"{{% for x{n} in 'abcdefghij' %}}" for n in range(12)) + "{% endfor %}" * 12,
        "{% macro m(n) %}{% if n %}{{ m(n - 1) ~ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
        "{% macro m() %}" + LOOP + "x" * 20_000 + "{% endfor %}{% endmacro %}{{ m() }}",
        "{{ 'a' * 10**10 }}",
        "{{ [0] * 10**10 }}",
        "{{ 9 ** 9 ** 9 }}",
        "{{ '%9999999999d' % 1 }}",
        "{{ '%*d' % (10**9, 1) }}",
        "{{ '%9999999999d' | format(1) }}",
        "{{ '{:9999999999}'.format(1) }}",
        "{{ '{:{}}'.format(1, 10**10) }}",
        "{{ 'a' | center(10**10) }}",
        "{{ 'a'.ljust(10**10) }}",
        "{{ ('a' * 9000).replace('a', 'b' * 9000) }}",
        "{{ ('a' * 9000).join('b' * 9000) }}",
        "{{ messages | tojson(indent=10**9) }}",
        "{{ [1] | batch(10**9, 'x') | list }}",
        "{{ strftime_now('%999999999Y') }}",
        GROW.replace("GROWN", "n.s + n.s"),
        GROW.replace("GROWN", "n.s ~ n.s"),
        GROW.replace("GROWN", "dict(a=n.s, b=n.s)") + "{{ n.s }}",
        "{% set s = 'ab' %}" + "{% set s %}{{ s }}{{ s }}{% endset %}" * 60,
    ],
)
def test_a_template_ends_soon_whatever_it_does(source, monkeypatch):
    """Without limits: after hours, or when no memory is left."""
    for name in ("BUDGET", "LARGEST"):  # a faster test
        monkeypatch.setattr(chat_template, name, getattr(chat_template, name) // 20)
    with pytest.raises(UserError, match="loops too often or builds too long a text"):
        rendered(source)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% for m in messages %}{{ loop.length }}{{ loop.last }}{% endfor %}", "2False2True"),
        ("{% generation %}{{ messages[-1].content }}{% endgeneration %}", "Ann"),
        ("{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}x{% endfor %}", "x"),
        ("{{ messages | map(attribute='role') | join(',') }}", "user,assistant"),
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "Who?"}'),
        ("{{ '<a>' | tojson }}{{ '%03d' % 7 }}{{ 'a,b'.split(',')[1] }}", '"<a>"007b'),
        ("{% set n = namespace(x=0) %}{% for m in messages %}{% set n.x = n.x + 1 %}{% endfor %}"
         "{{ n.x }}", "2"),
        ("{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}", "a1"),
        ("{{ strftime_now('%d %B %Y %H:%M') }}", "26 July 2024 00:00"),
    ],
)  # fmt: skip
def test_what_templates_use_renders_as_in_transformers(source, text):
    assert rendered(source) == text


def test_a_long_conversation_is_within_the_budget():
    turn = "{% for m in messages %}{{ m.role }}{{ m.content | trim }}{% endfor %}"
    text = render(turn + " " * 8000, {"messages": MESSAGES * 1000})
    assert text.count("Who?") == 1000
