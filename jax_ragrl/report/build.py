"""The report itself: a run's numbers and trees put into `template.html`."""

from __future__ import annotations

import importlib.resources
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jinja2
from markupsafe import Markup

from jax_ragrl.report import charts
from jax_ragrl.report.load import Curve, Run, curve, is_number, keys_under, load_run
from jax_ragrl.report.sketch import Scale, Twig, grow, scale_of, sketch

MAX_TREES = 6  # of each step shown
COLOURS = 6  # of strategies
SYSTEMS = {
    "direct": "No retrieval",
    "standard_rag": "Standard RAG",
    "warm_start": "Warm start",
    "trained": "Trained",
}
FACTS = {
    "steps": "Training steps",
    "questions": "Test questions",
    "metric": "Metric",
    "reader": "Frozen language model",
    "seed": "Seed",
}
# Of the run's config, by dotted key: what tells one run of an ablation from another.
CHOICES = {
    "system": "System",
    "policy": "Policy",
    "credit": "Credit",
    "objective.advantage": "Advantage",
    "run.questions": "Questions a step",
    "optimizer.policy_lr": "Learning rate",
    "seed": "Seed",
}
TITLES = {
    "kl/mean": "KL to the reference",
    "kl/loss": "KL in the loss",
    "kl/coefficient": "KL coefficient",
    "entropy": "Entropy",
    "clip_frac": "Clipped share",
    "response_length/mean": "Response length",
    "grad_norm": "Gradient norm",
    "zero_variance_frac": "Questions with equal rewards",
    "retrieval/recall": "Gold passages found",
    "right": "Pairs ordered rightly",
}
# Of one role, whose name follows.
ROLE_TITLES = {
    "valid_frac/": "Valid actions",
    "earned/": "Reward of its own",
    "actions/": "Actions a rollout",
    "zero_variance_frac/": "Groups with equal rewards",
    "kl/": "KL",
    "entropy/old/": "Entropy",
    "response_length/": "Response length",
}
# What a node is taken to be where the file does not tell.
NODE = {
    "id": None, "parent": None, "role": "", "text": "", "prompt": "", "forced": False,
    "multiplicity": 1, "credit": None, "reward": None, "answer": None, "why": "", "passages": (),
    "tokens": (), "calls": (),
}  # fmt: skip
SMALL = (
    *("earned/", "zero_variance_frac", "retrieval/recall", "valid_frac/", "actions/"),
    *("kl/", "entropy", "response_length/", "clip_frac", "grad_norm", "right"),
)
TWICE = ("entropy/old/mean",)  # shown as the entropy
WITHIN = "time/compile_s"  # a part of the other times
FAULTS = {"malformed/": "Malformed", "dead/": "Ended without an answer"}


class Panel(NamedTuple):
    """A small chart with its title and latest value."""

    title: str
    latest: str
    picture: Markup


class Tree(NamedTuple):
    """One question's tree, ready to be shown."""

    anchor: str
    question: str
    answers: str
    hops: Any
    roots: Sequence[Twig]
    picture: Markup
    leaves: int
    reward: float


def build_report(workdir: pathlib.Path) -> pathlib.Path:
    """Writes `workdir/report.html`: one file, no scripts, nothing fetched.

    Reads `metrics.jsonl` (one flat object a step); `summary.json` and `trees.jsonl` (one
    `{"step", "trees"}` a line, trees as `rollout.trace.trees` makes them) may be missing.

    Returns:
      The path of the report.

    Raises:
      UserError: the metrics are missing, or a file cannot be read; the message names the file and
        the command that makes it.
    """
    workdir = pathlib.Path(workdir)
    page = render(load_run(workdir))
    target = workdir / "report.html"
    # Text of documents and models may hold lone surrogates, which UTF-8 cannot.
    target.write_text(page, encoding="utf-8", errors="replace")
    return target


def render(run: Run) -> str:
    """The page of a run."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    source = importlib.resources.files("jax_ragrl.report") / "template.html"
    scale = scale_of([tree for row in run.trees for tree in row.get("trees", ())])
    return environment.from_string(source.read_text(encoding="utf-8")).render(
        summary=run.summary,
        facts=facts(run.summary, run.config),
        accuracy=accuracy(run.summary),
        gain=gain(run.summary),
        reward=reward(run),
        strategies=strategies(run),
        ended=ended(run.summary),
        panels=panels(run),
        faults=faults(run),
        times=times(run),
        costs=costs(run.summary),
        forests=forests(run, scale),
        scale=scale,
    )


def facts(summary: Mapping[str, Any], config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What the run was, as pairs of a name and a value."""
    chosen = {name: _held(config, key.split(".")) for key, name in CHOICES.items()}
    known = {name: value for name, value in chosen.items() if value is not None}
    known |= {name: summary[key] for key, name in FACTS.items() if summary.get(key) is not None}
    if is_number(summary.get("wall_s")):
        known["Wall time"] = duration(summary["wall_s"])
    return [(name, str(value)) for name, value in known.items()]


def _held(values: Any, keys: Sequence[str]) -> Any:
    """The value under nested keys; None where there is none."""
    for key in keys:
        values = values.get(key) if isinstance(values, Mapping) else None
    return values


def duration(seconds: float) -> str:
    """Seconds as people say them."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{seconds:.3g} s"


def ended(summary: Mapping[str, Any]) -> str:
    """How the answers to the test questions ended, and how often, the most frequent first."""
    counts = _numbers(summary.get("ended") or {})
    return ", ".join(f"{k} {counts[k]}" for k in sorted(counts, key=lambda k: -counts[k]))


def percent(summary: Mapping[str, Any]) -> float:
    """What turns the summary's accuracies into percent: 1 where its `metric` says percent."""
    return 1.0 if "percent" in str(summary.get("metric")) else 100.0


def accuracy(summary: Mapping[str, Any]) -> Markup | None:
    """A bar for every system."""
    values, unit = summary.get("accuracy") or {}, percent(summary)
    bars = [
        charts.Bar(SYSTEMS.get(key, key), unit * float(value), key == "trained")
        for key, value in values.items()
        if is_number(value)
    ]
    return charts.bar_chart(bars) if bars else None


def gain(summary: Mapping[str, Any]) -> dict[str, Any] | None:
    """The gain in points with its interval; `over` names the system it is over, if told."""
    found = summary.get("gain") or {}
    numbers = [found.get("mean"), *(found.get("ci95") or ())]
    if len(numbers) != 3 or not all(map(is_number, numbers)):
        return None
    mean, low, high = (percent(summary) * float(x) for x in numbers)
    over = found.get("over")
    return {
        "mean": f"{mean:+.1f}",
        "ci": f"{low:+.1f} to {high:+.1f}",
        "over": SYSTEMS.get(over, over).lower() if over else "",
        "picture": charts.interval_chart(mean, low, high),
    }


def reward(run: Run) -> dict[str, Any] | None:
    """Mean reward over steps, smoothed, with the accuracies measured on the way."""
    found, tested = curve(run.metrics, "reward/mean"), curve(run.metrics, "eval/accuracy")
    if not found.steps:
        return None
    lines = [charts.Line("reward", found, faint=True), charts.Line("", charts.smoothed(found))]
    if tested.steps:
        lines.append(charts.Line("accuracy", tested, "c1", dots=True))
    picture = charts.line_chart(lines, "Mean reward of the leaves over training steps")
    return {"picture": picture, "tested": bool(tested.steps)}


def strategies(run: Run) -> dict[str, Any] | None:
    """Shares of strategies over training and on the test questions, and what each earned.

    A strategy has one colour in all three pictures: its place in `names`. Some are only ever seen
    in training, where they were forced or sampled.
    """
    tested = _numbers(run.summary.get("strategy_share") or {})
    trained = [key.removeprefix("strategy/") for key in keys_under(run.metrics, "strategy/")]
    names = list(dict.fromkeys([*trained, *tested]))
    names += _tried(run, names)[: max(COLOURS - len(names), 0)]
    shares = _shares(run, names)
    if not shares:
        return None
    earned = _earned(run, names)
    shape = {"width": charts.HALF if earned else charts.FULL, "height": 230}
    bar = {name: tested.get(name, 0.0) for name in names}
    return {
        "names": names,
        "picture": charts.stacked_areas(shares, "Shares of strategies", **shape),
        "earned": charts.line_chart(earned, "Reward by strategy", **shape) if earned else None,
        "tested": charts.share_bar(bar, "Strategies on the test questions") if tested else None,
    }


def _tried(run: Run, names: Sequence[str]) -> list[str]:
    """The strategies that only training saw, those of most steps first."""
    seen = {key: len(curve(run.metrics, key).steps) for key in keys_under(run.metrics, "reward/")}
    found = [key.removeprefix("reward/") for key in sorted(seen, key=lambda k: -seen[k])]
    return [name for name in found if name != "mean" and name not in names]


def _shares(run: Run, names: Sequence[str]) -> dict[str, Curve]:
    """The share of every strategy at each step that logged any; what is not named there is 0."""
    keys = [f"strategy/{name}" for name in names]
    rows = [row for row in run.metrics if any(is_number(row.get(key)) for key in keys)]
    filled = [{**dict.fromkeys(keys, 0.0), **_numbers(row)} for row in rows]
    curves = {name: curve(filled, key) for name, key in zip(names, keys, strict=True)}
    return {name: charts.smoothed(c, least=1) for name, c in curves.items()} if rows else {}


def _earned(run: Run, names: Sequence[str]) -> list[charts.Line]:
    """The mean reward of each strategy, where the run logged it."""
    curves = {name: curve(run.metrics, f"reward/{name}") for name in names}
    return [
        charts.Line(name, charts.smoothed(c, least=1), f"c{i % COLOURS}")
        for i, (name, c) in enumerate(curves.items())
        if c.steps
    ]


def _numbers(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if is_number(value)}


def panels(run: Run) -> list[Panel]:
    """Small charts of the leading indicators, those that the run logged.

    Where a run has several policies, its keys begin with the name of one.
    """
    seen = keys_under(run.metrics, "")
    keys = [key for small in SMALL for key in seen if _plain(key).startswith(small)]
    curves = {key: curve(run.metrics, key) for key in keys if _plain(key) not in TWICE}
    return [_panel(key, found) for key, found in curves.items() if found.steps]


def _plain(key: str) -> str:
    """A metric's name without the policy that it is of."""
    policy, _, rest = key.partition("/")
    return rest if rest.startswith(SMALL) and not key.startswith(SMALL) else key


def _title(key: str) -> str:
    plain = _plain(key)
    of = f" ({key.removesuffix('/' + plain)})" if plain != key else ""
    role = next((p for p in ROLE_TITLES if plain.startswith(p)), "")
    known = TITLES.get(plain)
    return (known or (f"{ROLE_TITLES[role]}: {plain.removeprefix(role)}" if role else plain)) + of


def _panel(key: str, found: Curve) -> Panel:
    share, title = key.startswith("valid_frac/"), _title(key)
    last = charts.smoothed(found).values[-1]
    latest = f"{100 * last:.1f} %" if share else f"{last:.4f}" if abs(last) < 1 else f"{last:.3g}"
    return Panel(title, latest, charts.small_chart(found, title, share=share))


def faults(run: Run) -> list[tuple[str, str, str, str]]:
    """What went wrong in rollouts, and how often: in the first step, in the last, in all."""
    if not run.metrics:
        return []
    rows = []
    for prefix, name in FAULTS.items():
        for key in keys_under(run.metrics, prefix):
            ends = [run.metrics[i].get(key, 0) for i in (0, -1)]
            counts = [*ends, sum(curve(run.metrics, key).values)]
            rows.append((f"{name}: {key.removeprefix(prefix)}", *(f"{n:.0f}" for n in counts)))
    return rows  # type: ignore[return-value]


def times(run: Run) -> list[tuple[str, str, str, str]]:
    """Where the time of a step went: name, mean seconds, total, share of the sum."""
    curves = {key: curve(run.metrics, key) for key in keys_under(run.metrics, "time/")}
    totals = {key: sum(c.values) for key, c in curves.items() if c.steps}
    whole = sum(total for key, total in totals.items() if key != WITHIN) or 1.0
    return [
        (
            key.removeprefix("time/").removesuffix("_s").capitalize()
            + " (within the others)" * (key == WITHIN),
            f"{total / len(curves[key].values):.2f} s",
            duration(total),
            f"{100 * total / whole:.0f} %",
        )
        for key, total in totals.items()
    ]


def costs(summary: Mapping[str, Any]) -> dict[str, Any] | None:
    """The summary's `costs` of an answer, `{system: {column: number}}`, as header and rows."""
    table = {k: v for k, v in (summary.get("costs") or {}).items() if isinstance(v, Mapping)}
    columns = list(dict.fromkeys(column for row in table.values() for column in row))
    if not columns:
        return None
    rows = [
        (SYSTEMS.get(name, name), [_cell(row.get(c)) for c in columns])
        for name, row in table.items()
    ]
    return {"columns": [c.replace("_", " ") for c in columns], "rows": rows}


def _cell(value: Any) -> str:
    if not is_number(value):
        return "–" if value is None else str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def forests(run: Run, scale: Scale) -> list[dict[str, Any]]:
    """The trees of the first and of the last recorded step; the last comes first."""
    rows = [row for row in run.trees if row.get("trees")]
    chosen = [rows[-1], rows[0]] if len(rows) > 1 else rows
    return [
        {
            "step": row["step"],
            "trees": [
                _tree(tree, f"s{n}t{i}", scale) for i, tree in enumerate(row["trees"][:MAX_TREES])
            ],
        }
        for n, row in enumerate(chosen)
    ]


def _tree(tree: Mapping[str, Any], anchor: str, scale: Scale) -> Tree:
    nodes = [{**NODE, **node} for node in tree.get("nodes") or ()]
    roots = grow(nodes)
    leaves = [node for node in nodes if node.get("role") == "leaf"]
    rewards = [float(node["reward"]) for node in leaves if is_number(node.get("reward"))]
    return Tree(
        anchor=anchor,
        question=str(tree.get("question", "")),
        answers=" · ".join(map(str, tree.get("answers") or ())),
        hops=tree.get("hops"),
        roots=roots,
        picture=sketch(roots, scale, anchor),
        leaves=len(leaves),
        reward=sum(rewards) / max(len(rewards), 1),
    )
