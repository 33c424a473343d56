"""The report: headline numbers, inert text, no external resources, damaged files."""

import html.parser
import json
import pathlib
import re
import types
from collections.abc import Sequence
from typing import Any

import pytest

from jax_ragrl.cli.train import _print_facts
from jax_ragrl.errors import UserError
from jax_ragrl.report import build, build_report, charts
from jax_ragrl.report.build import TIMES, render, times
from jax_ragrl.report.load import Curve, RunData, by_step, curve, load_run
from jax_ragrl.report.sketch import Scale, build_tree, credit_scale
from jax_ragrl.report.svg import Frame, axes
from jax_ragrl.report.trees import largest_credit, spread, stored_trees
from jax_ragrl.run.metric_names import METRICS
from jax_ragrl.systems.c3po import C3PO

EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&"

SUMMARY = {
    "steps": 3,
    "wall_s": 61.0,
    "metric": "cover-EM, percent",
    "accuracy": {"direct": 20.0, "standard_rag": 40.0, "warm_start": 45.0, "trained": 61.5},
    "gain": {"mean": 16.5, "ci95": [11.0, 22.0], "over": "warm_start"},
    "strategy_share": {"Planning": 0.7, "Retrieval": 0.3},
    "costs": {"trained": {"llm_calls": 1.5}},
    "reader": "a reader",
    "seed": 0,
}


def test_a_run_without_steps_has_a_report(tmp_path):
    """A policy that is only evaluated writes no metrics; a run that lost them is an error."""
    file = tmp_path / "summary.json"
    file.write_text(json.dumps(SUMMARY | {"steps": 0}))
    assert "61.5" in build_report(tmp_path).read_text(encoding="utf-8")
    file.write_text(json.dumps(SUMMARY))
    with pytest.raises(UserError, match=r"metrics.jsonl is missing"):
        build_report(tmp_path)


def metrics(step: int) -> dict[str, Any]:
    row = {"step": step, "reward/mean": 0.4 + 0.1 * step, "kl/mean": 0.01 * step, "entropy": 0.5}
    row |= {"strategy_frac/Planning": 0.6, "strategy_frac/Retrieval": 0.4}
    row |= {"time/rollout_s": 2.0, "time/train_s": 1.0, "time/compile_s": 1.5, "time/step_s": 3.0}
    return row | {"valid_frac/router": 0.97}


def node(number: int, parent: int | None, role: str = "filter", **values: Any) -> dict[str, Any]:
    defaults = {"text": "", "prompt": "", "forced": False, "multiplicity": 1, "credit": 0.5}
    defaults |= {"reward": None, "answer": None, "why": "", "passages": [], "depth": 1}
    return {"id": number, "parent": parent, "role": role, **defaults, **values}


def tree(nodes: list[dict[str, Any]], question: str = "Who?") -> dict[str, Any]:
    return {"question": question, "answers": ["Ann"], "hops": 2, "nodes": nodes}


NODES = [
    node(0, None, "router", text="[Planning]", forced=True, multiplicity=3, credit=0.25),
    node(1, 0, passages=[{"title": "T", "text": "text", "kept": True}], credit=None),
    node(2, 1, "leaf", answer="Ann", reward=1.0, credit=1.0, why="answered"),
    node(3, 0, "leaf", reward=0.0, credit=0.0, why="Max Depth"),
]


def lines(rows: Sequence[Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def write_run(
    folder: pathlib.Path,
    *,
    rows: Sequence[Any] = tuple(map(metrics, range(3))),
    trees: list[Any] | None = None,
    summary: Any = SUMMARY,
    config: Any = None,
) -> pathlib.Path:
    (folder / "metrics.jsonl").write_text(lines(rows))
    (folder / "summary.json").write_text(json.dumps(summary))
    if trees is not None:
        (folder / "trees.jsonl").write_text(lines([{"step": 2, "trees": trees}]))
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


class Page(html.parser.HTMLParser):
    """The tags, attributes and text of a page, and whether its tags are balanced."""

    VOID = {"meta", "br", "link", "img", "input"}

    def __init__(self, source: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def read(folder: pathlib.Path) -> Page:
    page = Page(build_report(folder).read_text(encoding="utf-8"))
    assert page.open == []
    return page


def evil_tree() -> dict[str, Any]:
    passages = [{"title": EVIL, "text": EVIL, "kept": True}]
    texts = {"text": EVIL, "prompt": EVIL, "why": EVIL, "passages": passages}
    nodes = [
        node(0, None, EVIL, tokens=[[EVIL, -0.5], [EVIL, None]], **texts),
        node(1, 0, "leaf", answer=EVIL, reward=1.0),
        node(2, 0, "leaf", why=EVIL, reward=0.0),
    ]
    return tree(nodes, EVIL) | {"answers": [EVIL]}


def test_text_from_documents_and_models_is_inert(tmp_path):
    values = {"accuracy": {EVIL: 10.0}, "strategy_share": {EVIL: 1.0}, "reader": EVIL}
    write_run(tmp_path, trees=[evil_tree()], summary={**SUMMARY, **values, "ended": {EVIL: 1}})
    page = read(tmp_path)
    tags = {tag for tag, _ in page.tags}
    assert not tags & {"script", "img", "iframe", "object", "link", "form"}
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    # Each place shows it as text instead of dropping it.
    assert page.text.count("<script>alert(1)</script>") >= 12


def test_the_page_has_no_external_resources(tmp_path):
    source = build_report(write_run(tmp_path, trees=[tree(NODES)])).read_text()
    addresses = {
        value
        for _, attributes in Page(source).tags
        for name, value in attributes.items()
        if name in ("href", "src", "xlink:href", "action", "srcset") and value
    }
    assert addresses and all(address.startswith("#") for address in addresses)
    assert "http" not in re.sub(r"http-equiv", "", source) and "@import" not in source
    assert "url(" not in source and "default-src 'none'" in source


CALLS = [
    node(0, None, "executor", passages=[{"title": "T", "text": "text"}]),
    node(1, 0, "leaf", answer="Ann", calls=[["search", "q -> T"], ["answer", "Ann"]]),
]
FAILURES = ({"invalid_action/No JSON": 5.0}, {}, {"unanswered/Max Depth": 1})
WORLD = {"data": {"world": {"seed": 7, "size": 60}}, "llm": {"kind": "none"}}
SHARES = {"accuracy": {"trained": 0.615}, "gain": {"mean": 0.165, "ci95": [0.11, 0.22]}}
CHOICES = {"system": "opera", "objective": {"advantage": "group_centred"}, "credit": EVIL}


@pytest.mark.parametrize(
    ("run", "words"),
    [
        ({}, ["20.0 %", "40.0 %", "45.0 %", "61.5 %", "+16.5", "+11.0 to +22.0", "warm start"]),
        # Without a metric in percent the accuracies are shares.
        ({"summary": SHARES}, ["61.5 %", "+11.0 to +22.0"]),
        # Rollouts and update add up to the step; other times are parts of them.
        ({}, ["Rollouts 2.00 s 6 s 67 %", "Update 1.00 s 3 s 33 %"]),
        ({}, ["Compilation, within the other times 1.50 s 4.5 s 50 %"]),
        ({"trees": [tree(NODES)]}, ["0.25", "not trained", "forced", "× 3"]),
        ({"trees": [tree(NODES)]}, ["1 of 1 passages selected", "✓ reward 1", "✗ reward 0"]),
        ({"trees": [tree(NODES)]}, ["no answer: Max Depth"]),
        ({"trees": [tree(CALLS)]}, ["1 passage retrieved", "2 calls to the environment", "q -> T"]),
        ({"config": CHOICES}, ["System opera", "Advantage group_centred", EVIL]),
        ({"config": WORLD}, ["Corpus synthetic, seed 7, size 60"]),
        # Each kind of failure has the sentence of the glossary.
        (
            {"rows": [metrics(i) | more for i, more in enumerate(FAILURES)]},
            [
                "Invalid action: No JSON The query is not in a JSON object. 5 0 5",
                f"Ended without an answer: Max Depth {C3PO.FAULTS['Max Depth']} 0 1 1",
            ],
        ),
        (
            {"summary": {**SUMMARY, "ended": {"Max Depth": 2, "answered": 9}}},
            ["Outcomes of the trained system: answered 9, Max Depth 2."],
        ),
    ],
)
def test_a_page_shows_what_a_run_has(tmp_path, run, words):
    text = read(write_run(tmp_path, **run)).text
    assert [word for word in words if word not in text] == []


def test_times_of_a_step_have_titles_and_its_parts_are_not_added_to_it(tmp_path):
    names = {"step": 40, "train": 10, "rollout": 30, "wait_rollout": 30, "wait_device": 20}
    row = {"step": 1} | {f"time/{name}_s": float(x) for name, x in names.items()}
    run = load_run(write_run(tmp_path, rows=[row]))
    assert [(name, share) for name, *_, share in times(run)] == [
        ("Step", "100 %"),
        ("Rollouts", "75 %"),
        ("Update", "25 %"),
        ("The step waited for its rollouts", "75 %"),
        ("Rollouts waited for the devices", "50 %"),
    ]
    names = {metric.name for metric in METRICS if metric.name.startswith("time/")}
    assert names == set(TIMES)


def test_wide_pictures_have_a_narrow_version_with_all_labels():
    """On a phone the text of a wide picture would be too small to read."""
    curve = Curve((1.0, 10.0), (0.1, 0.9))
    bars = [charts.Bar("Warm start: always No Retrieval", 46.0), charts.Bar("Trained", 57.0, True)]
    for picture in (
        charts.line_chart([charts.Line("", curve)], "a line"),
        charts.stacked_areas({"a": curve}, "shares"),
        charts.share_bar({"a": 0.5, "b": 0.5}, "a bar"),
        charts.bar_chart(bars),
    ):
        widths = re.findall(r'<svg class="(\w+)" viewBox="0 0 (\d+)', picture)
        assert [name for name, _ in widths] == ["wide", "narrow"]
        assert int(widths[1][1]) == charts.NARROW < int(widths[0][1])
    assert picture.count("always No Retrieval</text>") == picture.count("57.0 %</text>") == 2


@pytest.mark.parametrize("last", [11, 80, 1000])
@pytest.mark.parametrize("width", [charts.FULL, charts.HALF, charts.NARROW])
def test_labels_of_steps_do_not_overlap(last, width):
    """The label of the last step ends at the right, and the one before ends before it begins."""
    picture = axes(Frame(width, 200, 1, last, 0, 1), (0, 1), "{:g}")
    places = re.findall(r'<text x="([\d.]+)"[^>]*text-anchor="middle"[^>]*>([\d.]+)<', picture)
    assert places
    begin = width - 12 - 6 * len(f"step {last}")  # a letter of a tick has six pixels
    assert all(float(x) + 3 * len(name) < begin for x, name in places)


def test_each_link_of_a_drawing_targets_a_node(tmp_path):
    page = read(write_run(tmp_path, trees=[tree(NODES), tree(NODES)]))
    links = [a["href"] for tag, a in page.tags if tag == "a"]
    ids = [a["id"] for _, a in page.tags if "id" in a]
    assert len(links) == len(set(links)) == 8
    assert {f"#{i}" for i in ids} >= set(links) and len(ids) == len(set(ids))


@pytest.mark.parametrize(
    "changes",
    [
        {"summary": {}},
        {"summary": {"accuracy": {}, "gain": {"mean": None, "ci95": [1]}}},
        {"rows": []},
        {"rows": [metrics(0)]},
    ],
)
def test_missing_parts_of_a_run_are_omitted(tmp_path, changes):
    text = read(write_run(tmp_path, **changes)).text
    assert "Trees" not in text and ("Gain" in text) == ("summary" not in changes)


DATA = {"files": {"corpus": "docs", "train": "asked.csv", "dev": "dev.csv"}}


def test_a_report_names_what_a_run_was_trained_on_and_its_scores(tmp_path, capsys):
    llm = {"kind": "openai", "model": "a-model", "base_url": "http://host:8000/v1"}
    config = {"data": DATA, "index": {"kind": "scann", "encoder": "minilm"}, "llm": llm}
    rows = [metrics(step) | {"eval/accuracy": x} for step, x in enumerate((0.25, 0.75, 0.5))]
    write_run(tmp_path, rows=rows, config=config, summary={"accuracy": {"trained": 0.615}})
    facts = {
        "Corpus": "docs",
        "Training questions": "asked.csv",
        "Retriever": "scann, minilm",
        "Frozen language model": "openai, a-model, http://host:8000/v1",
        "Test result": "61.5 %",
        "Dev score": "25.0 % (step 0) → 50.0 % (step 2), best 75.0 % (step 1), "
        "whose policies RUN@best has",
    }
    text = read(tmp_path).text
    _print_facts(tmp_path)  # the end of 'ragrl train'
    printed = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    for name, value in facts.items():
        assert f"{name} {value}" in text and f"{name}: {value}" in printed
    assert "Judge" not in text and f"ragrl report {tmp_path}" in printed[-1]
    over = {"over": "trained: always Planning", "mean": 8.5, "ci95": [2.5, 14.5]}
    scores = {"warm_start": 41.5, over["over"]: None, "trained": 69.25}
    values = {"metric": "F1, percent", "accuracy": scores, "gain_over_fixed": over}
    write_run(tmp_path, summary=values | {"gain_over_supervised": over | {"over": "supervised"}})
    _print_facts(tmp_path)
    printed = [line.strip() for line in capsys.readouterr().out.splitlines()]
    start = printed.index("Test questions (F1, percent):")
    assert [line.split() for line in printed[start + 1 : start + 4]] == [
        ["Warm", "start", "41.5"],
        ["Trained:", "always", "Planning", "None"],
        ["Trained", "69.25"],
    ]
    for line, name in enumerate(("trained: always Planning", "supervised, same time"), start + 4):
        assert printed[line] == f"+8.5 points (+2.5 to +14.5) over {name}"


def leaves_of(*values: float) -> list[dict[str, Any]]:
    return [
        node(0, None, credit=-0.5),
        *(node(n, 0, "leaf", reward=x) for n, x in enumerate(values, 1)),
    ]


def test_trees_whose_leaves_differ_come_first(tmp_path):
    trees = {name: tree(leaves_of(*values), name) for name, values in {
        "Both right?": (1, 1), "A little?": (0.5, 0.25), "A lot?": (0, 1), "Both wrong?": (0, 0),
    }.items()}  # fmt: skip
    rows = [{"step": 1, "trees": [trees["Both right?"], trees["A little?"]]},
            {"step": 2, "trees": [trees["A lot?"], trees["Both wrong?"]]}]  # fmt: skip
    order = [tree["question"] for tree in stored_trees(rows)]
    assert order == ["A lot?", "A little?", "Both wrong?", "Both right?"]
    assert [spread(tree) for tree in stored_trees(rows)] == [1, 0.25, 0, 0]
    assert largest_credit(stored_trees(rows)[0]) == 0.5
    (write_run(tmp_path) / "trees.jsonl").write_text(lines(rows))
    text = read(tmp_path).text
    places = [
        text.rindex(word) for word in ("Leaves differ", *order[:2], "Leaves agree", *order[2:])
    ]
    assert places == sorted(places)
    assert "2 leaves, mean reward 0.5, spread 1, largest credit 0.5" in text


def test_trees_beyond_the_limit_of_a_report_are_counted(tmp_path):
    many = [tree(leaves_of(0, n % 2), f"Question {n}?") for n in range(14)]
    text = read(write_run(tmp_path, trees=many)).text
    assert "2 more: see explorer.html" in text and "Question 1?" in text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("metrics.jsonl", '{"step": 0}\n{"step": \n{"step": 2}\n'),
        ("metrics.jsonl", "[1]\n"),
        ("summary.json", "{"),
        ("summary.json", "[]"),
        ("trees.jsonl", "1\n"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, name, text):
    (write_run(tmp_path) / name).write_text(text)
    with pytest.raises(UserError, match=name):
        build_report(tmp_path)


def test_a_truncated_last_line_is_ignored(tmp_path):
    text = read(write_run(tmp_path)).text
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "rew')
    assert read(tmp_path).text == text


def test_a_curve_has_one_finite_value_per_step():
    rows = by_step([{"step": 0, "x": 1.0}, {"step": 1, "x": 2.0}, {"step": 1, "x": 3.0}])
    assert curve(rows, "x") == ((0.0, 1.0), (1.0, 3.0))
    values = (1.0, float("nan"), None, "2", True, float("inf"), 7)
    rows = by_step([{"step": i, "x": x} for i, x in enumerate(values)])
    assert curve(rows, "x") == ((0.0, 6.0), (1.0, 7.0))


def test_steps_are_whole_numbers():
    picture = axes(Frame(600, 200, 1, 2, 0, 1), (0, 1), "{:g}")
    assert re.findall(r">(1\.\d+)<", picture) == [] and ">1<" in picture and ">step 2<" in picture


def test_the_reward_curve_is_that_of_the_own_choices_if_others_are_forced():
    rows = [{"step": step, "reward/mean": 0.5} for step in (1, 2)]
    own = [row | {"reward/own": row["step"] / 4} for row in rows]
    flat, rising = (build.reward(types.SimpleNamespace(metrics=x)) for x in (rows, own))
    assert not flat["is_own"] and rising["is_own"] and flat["picture"] != rising["picture"]


def test_credit_is_colored_by_its_distance_from_the_middle():
    scale = Scale(0.0, 1.0)
    assert [scale.tint(c) for c in (0.0, 0.25)] == [("bad", 100), ("bad", 50)]
    assert [scale.tint(c) for c in (0.5, 1.0)] == [("good", 0), ("good", 100)]
    assert scale.tint(None) == scale.tint(float("nan")) == ("none", 0)


@pytest.mark.parametrize(
    ("credit", "scale"),
    [((2.0, None), (0.0, 2.0)), ((-3.0, 1.0), (-3.0, 3.0)), ((-0.2,), (-1.0, 1.0))],
)
def test_the_scale_has_all_credit_and_is_symmetric_if_some_is_negative(credit, scale):
    nodes = [node(i, None, credit=x) for i, x in enumerate(credit)]
    assert credit_scale([tree(nodes)]) == scale


def test_a_node_with_an_unknown_parent_is_a_root():
    assert [t.record["id"] for t in build_tree([node(5, 99), node(6, 5), node(7, 7)])] == [5, 7]


def test_a_strategy_has_one_color_in_all_pictures(tmp_path):
    rows = [
        {**metrics(i), "strategy_frac/None": 0.1, "strategy_reward/Retrieval": 0.5}
        for i in range(3)
    ]
    summary = {**SUMMARY, "strategy_share": {"Retrieval": 1.0, "New": 0.0}}
    page = read(write_run(tmp_path, rows=rows, summary=summary))
    kinds = ["Planning", "Retrieval", "None", "New"]
    titles = [f"{name}: {share} %" for name, share in zip(kinds, (0, 100, 0, 0), strict=True)]
    # Twice: the wide bar and the narrow one.
    assert [word for word in page.words if word in titles] == [*titles, *titles]
    assert "line c1" in {attributes.get("class") for _, attributes in page.tags}


def page_with(folder: pathlib.Path, **values: float) -> Page:
    """The page of a run with three steps and additional metrics."""
    return read(write_run(folder, rows=[{**metrics(step), **values} for step in range(3)]))


def test_strategies_of_rollouts_have_rewards(tmp_path):
    rewards = {f"strategy_reward/kind {i}": 0.5 for i in range(9)}
    page = page_with(tmp_path, **{"strategy_reward/Direct": 0.2}, **rewards)
    assert {"Planning", "Direct", "kind 0"} <= set(page.words) and "mean" not in page.words
    assert "kind 3" not in page.words  # with Planning and Retrieval, six colors are used


def test_indicators_name_their_role_and_policy(tmp_path):
    values = {"kl/plan": 0.1, "entropy/old/plan": 0.2, "entropy/old/mean": 0.3, "one/kl/plan": 0.4}
    values |= {"role_reward/plan": 0.5, "frac_reward_zero_std/plan": 0.1}
    words = page_with(tmp_path, **values).words
    assert {"KL: plan", "Entropy: plan", "KL: plan (one)", "Role reward: plan"} <= set(words)
    assert "Groups with equal rewards: plan" in words
    assert "entropy/old/mean" not in words


def test_the_gain_over_the_best_fixed_strategy_is_shown_beside_the_headline():
    over = {"over": "trained: always Planning", "mean": 8.5, "ci95": [2.5, 14.5]}
    summary = {"metric": "F1, percent", "gain": {"over": "direct", "mean": 11.0, "ci95": [4, 17]}}
    page = render(RunData((), (), summary | {"gain_over_fixed": over}))
    text = " ".join(page.split())
    assert "Over trained: always Planning, the best fixed strategy of the same policy" in text
    assert "<b>+8.5</b> points (+2.5 to +14.5)" in text
    assert "best fixed strategy" not in render(RunData((), (), summary))
