"""Renders the chat template of a model: code of others, with a fixed date and bounded work.

The sandbox of Jinja keeps a template from reaching Python's internals, but not from running for
ever or from filling the memory. Here every loop, call, filter and operator takes its cost from one
budget before it runs. A template of a published model needs less than a thousandth of it.
"""

from __future__ import annotations

import datetime
import functools
import itertools
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from jax_ragrl.errors import UserError

# A cost of 1 is about a character; a step of a loop costs STEP and as much as the template is long.
BUDGET, LARGEST, STEP = 300_000_000, 2_000_000, 1000
TODAY = datetime.datetime(2024, 7, 26)  # the day that Llama 3.2's template shows without a clock
REMEDY = "correct chat_template.jinja (or chat_template in tokenizer_config.json) of the model"
# Filters that return a part of their input: measuring it would cost more than they do.
_CHEAP = ("length", "count", "first", "last", "default", "d")
_BOUNDED, _STEPS = "bounded", "steps"  # names of the filters that the compiler inserts


class _TooCostlyError(Exception):
    """The template needs more than its budget."""


def render(source: str, variables: Mapping[str, Any]) -> str:
    """Renders a chat template as Transformers does, but within a budget and on a fixed day.

    Raises:
      UserError: the template does not parse, refuses the conversation, or does too much.
    """
    chunks, length = [], 0
    try:
        env = _Environment(STEP + len(source))
        code = env.compile(_Guards().visit(env.parse(source)))
        template = env.template_class.from_code(env, code, env.make_globals(None))
        for chunk in template.generate(**variables):
            length += len(chunk)
            env.spend(len(chunk) if length <= LARGEST else length)
            chunks.append(chunk)
    except jinja2.TemplateSyntaxError as error:
        why = f"does not parse (line {error.lineno}: {error.message})"
        raise UserError(f"the chat template {why}: {REMEDY}") from error
    except _TooCostlyError as error:
        raise UserError(
            f"the chat template loops too often or builds too long a text: {REMEDY}"
        ) from error
    # Templates are code of others: they raise whatever Python raises.
    except Exception as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        roles = ", ".join(str(message["role"]) for message in variables["messages"][:4])
        raise UserError(
            f"the chat template fails for a conversation that begins with {roles} ({why}): use a "
            f"prompt style whose roles it accepts, or {REMEDY}"
        ) from error
    return "".join(chunks)


class _Environment(ImmutableSandboxedEnvironment):
    """Transformers' environment of chat templates, with a budget: a loop or a call costs `step`."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, step: int) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        self.step, self.left = step, float(BUDGET)
        self.finalize = self.bounded
        self.filters |= {"tojson": _to_json}
        self.filters = {
            name: function if name in _CHEAP else self._guarded(function)
            for name, function in self.filters.items()
        }
        self.filters |= {_BOUNDED: self.bounded, _STEPS: self.steps}
        del self.globals["lipsum"]  # long texts from a small argument
        self.globals |= {"raise_exception": _refuse, "strftime_now": _on_that_day}

    def spend(self, cost: float) -> None:
        self.left -= cost
        # Written so that NaN, the size of a float, fails too.
        if not (cost <= LARGEST and self.left >= 0):
            raise _TooCostlyError

    def bounded(self, value: Any) -> Any:
        self.spend(_size(value))
        return value

    def steps(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self.spend(self.step)
            yield item

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        # The sandbox wraps the method `format` of texts.
        method = getattr(function, "__wrapped__", function)
        owner, values = getattr(method, "__self__", None), [*args, *kwargs.values()]
        self.spend(self.step + sum(map(_size, values)))
        if isinstance(owner, str | bytes):
            self._check_product(owner, *values)
        return self.bounded(super().call(context, function, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":
            self.spend(_size(left) + _size(right))
        elif operator != "%" or isinstance(left, str):
            self._check_product(left, right)
        return super().call_binop(context, operator, left, right)

    def _check_product(self, *values: Any) -> None:
        """Spends the product of sizes, which no method, filter or operator of text exceeds."""
        # The exception is a number in the text of a format, as in '%999999999d'.
        texts = (value for value in values if isinstance(value, str) and len(value) <= LARGEST)
        if any(re.search(r"[%{][^%{]*\d{5}", text) for text in texts):
            raise _TooCostlyError
        product: float = 1
        for value in values:
            product *= max(1, _size(value))
            self.spend(product)

    def _guarded(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The filter with its cost taken before it runs, and a list in place of a generator."""

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            # Some filters take the environment or the context first.
            data = args[1:] if hasattr(function, "jinja_pass_arg") else args
            self._check_product(*data, *kwargs.values())
            result = function(*args, **kwargs)
            if isinstance(result, Iterator):
                result = list(itertools.islice(result, LARGEST))
            return self.bounded(result)

        return run


class _Guards(NodeTransformer):
    """Inserts the two filters: around the items of loops, and around what expressions build."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 - the visitor's naming
        if node.recursive:
            raise jinja2.TemplateSyntaxError("recursive loops are not supported", node.lineno)
        self.generic_visit(node)
        node.iter = _filter(node.iter, _STEPS)
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.expr = _filter(node.expr, _BOUNDED)
        return node

    def _build(self, node: nodes.Expr) -> nodes.Node:
        self.generic_visit(node)
        is_target = getattr(node, "ctx", "load") != "load"
        return node if is_target else _filter(node, _BOUNDED)

    visit_Concat = visit_List = visit_Tuple = visit_Dict = _build  # noqa: N815


def _filter(node: Any, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class _Generation(Extension):
    """The tag `{% generation %}` of Transformers, which marks the assistant's tokens."""

    tags = {"generation"}

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _size(value: Any) -> float:
    """The characters and items of a value, and its numbers; more than LARGEST is not counted."""
    total: float = 0
    stack = [value]
    while stack and total <= LARGEST:
        item = stack.pop()
        if isinstance(item, str | bytes | range):
            total += len(item)
        elif isinstance(item, int | float):
            total += abs(item)
        elif isinstance(item, Mapping):
            stack += [*item.keys(), *item.values()]
        elif isinstance(item, Collection) and not isinstance(item, jinja2.Undefined):
            total += 1
            stack += item
        else:
            total += 1
    return total


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _on_that_day(form: str) -> str:
    # Today's date would give a resumed run other prompts.
    if re.search(r"\d{3}", form):
        raise _TooCostlyError  # a width
    return TODAY.strftime(form)


# Jinja's own filter escapes the characters of HTML.
def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)
