"""Renders the report: the numbers and trees of a run in `template.html`."""

from __future__ import annotations

import base64
import hashlib
import importlib.resources
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jinja2
from markupsafe import Markup

from jax_ragrl.report import charts
from jax_ragrl.report.load import Curve, RunData, curve, is_number, keys_under, load_run
from jax_ragrl.report.sketch import Scale, build_tree, credit_scale, draw_tree
from jax_ragrl.report.trees import LEAF, largest_credit, rewards, spread, stored_trees
from jax_ragrl.runtime.caches import write_text
from jax_ragrl.systems.registry import explain, known_faults

MAX_TREES = 12  # of the report; the explorer has all
COLORS = 6  # for strategies, c0 to c5 of the style sheet
SYSTEMS = {
    "direct": "No retrieval",
    "standard_rag": "Standard RAG",
    "warm_start": "Warm start",
    "supervised": "Supervised, same time",
    "trained": "Trained",
}
FACTS = {
    "steps": "Training steps",
    "questions": "Test questions",
    "metric": "Metric",
    "reader": "Frozen language model",
    "seed": "Seed",
}
# Dotted config keys that distinguish the runs of an ablation.
CHOICES = {
    "system": "System",
    "policy": "Policy",
    "credit": "Credit",
    "objective.advantage": "Advantage",
    "run.questions_per_step": "Questions per step",
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
    "frac_reward_zero_std": "Questions with equal rewards",
    "reward_order": "Right answers with the higher reward",
    "retrieval/recall": "Recall of gold passages",
    "retrieval/recall_per_rollout": "Recall of gold passages per rollout",
    "retrieval/recall_first_search": "Recall of gold passages, first search",
    "right": "Pairs ranked correctly",
}
# Metrics per role: the name of the role follows.
ROLE_TITLES = {
    "valid_frac/": "Valid actions",
    "role_reward/": "Role reward",
    "actions_per_rollout/": "Actions per rollout",
    "frac_reward_zero_std/": "Groups with equal rewards",
    "kl/": "KL",
    "entropy/old/": "Entropy",
    "response_length/": "Response length",
}
SMALL = (
    *("role_reward/", "frac_reward_zero_std", "reward_order", "retrieval/recall", "valid_frac/"),
    *("actions_per_rollout/", "kl/", "entropy", "response_length/", "clip_frac", "grad_norm"),
    "right",
)
REDUNDANT = ("entropy/old/mean",)  # equals "entropy", which is shown
# The times of a step, by the name of their metric without `_s`. A step is its rollouts and its
# update; all others are parts of these.
STEP_TIME = "time/step_s"
TIMES = {
    "time/step_s": "Step",
    "time/rollout_s": "Rollouts",
    "time/train_s": "Update",
    "time/wait_rollout_s": "The step waited for its rollouts",
    "time/wait_device_s": "Rollouts waited for the devices",
    "time/wait_llm_s": "Rollouts waited for a language model",
    "time/wait_retriever_s": "Rollouts waited for the retriever",
    "time/wait_host_s": "Rollouts waited for no call",
    "time/compile_s": "Compilation, within the other times",
}
FAILURES = {"invalid_action/": "Invalid action", "unanswered/": "Ended without an answer"}


SHARE, REWARD = "strategy_frac/", "strategy_reward/"  # prefixes of metrics per strategy


class Live(NamedTuple):
    """Additions to the report while it is served.

    `version` changes when the run has written something, `message` says why the report is empty,
    and `explorer` whether the server has predictions to show.
    """

    version: str
    message: str
    explorer: bool

    @property
    def script(self) -> Markup:
        file = importlib.resources.files("jax_ragrl.report") / "live.js"
        return Markup(file.read_text(encoding="utf-8"))

    @property
    def digest(self) -> str:
        """The hash of the only script that may run."""
        return base64.b64encode(hashlib.sha256(self.script.encode()).digest()).decode()


def build_report(workdir: pathlib.Path, out: pathlib.Path | None = None) -> pathlib.Path:
    """Writes `out/report.html`: one file without scripts or external resources; returns its path.

    `out`, which must exist, is by default the folder of the run itself.
    Reads `metrics.jsonl` (one flat object per step). `summary.json` and `trees.jsonl` (one
    `{"step", "trees"}` per line, with trees of `rollout.trace.trees`) may be missing. `UserError`
    if the metrics are missing, or a file cannot be read.
    """
    workdir = pathlib.Path(workdir)
    page = render(load_run(workdir))
    target = (out or workdir) / "report.html"
    # Texts of documents and models may hold lone surrogates, which UTF-8 cannot encode.
    write_text(target, page, errors="replace")
    return target


def render(run: RunData, live: Live | None = None) -> str:
    """Renders the page of a run; `live` makes it follow the run."""
    # Autoescape: the page shows texts of models and documents, which may contain HTML.
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    source = importlib.resources.files("jax_ragrl.report") / "template.html"
    scale = credit_scale([tree for row in run.trees for tree in row.get("trees", ())])
    return environment.from_string(source.read_text(encoding="utf-8")).render(
        summary=run.summary,
        facts=facts(run),
        accuracy=accuracy(run.summary),
        gain=gain(run.summary),
        gain_over_fixed=gain(run.summary, "gain_over_fixed"),
        reward=reward(run),
        strategies=strategies(run),
        outcomes=outcomes(run.summary),
        panels=panels(run),
        failures=failures(run),
        times=times(run),
        costs=costs(run.summary),
        forests=forests(run, scale),
        scale=scale,
        live=live,
    )


def facts(run: RunData) -> list[tuple[str, str]]:
    """Facts about the run, as pairs of a name and a value: data, models, choices and results."""
    summary, config = run.summary, run.config
    choices = {name: _nested(config, key.split(".")) for key, name in CHOICES.items()}
    pairs = origin(config) | {name: value for name, value in choices.items() if value is not None}
    pairs |= results(run)
    pairs |= {name: summary[key] for key, name in FACTS.items() if summary.get(key) is not None}
    if is_number(summary.get("wall_s")):
        pairs["Wall time"] = duration(summary["wall_s"])
    return [(name, str(value)) for name, value in pairs.items()]


def origin(config: Mapping[str, Any]) -> dict[str, str]:
    """Names the data and models of a run: corpus, questions, retriever, frozen model, judge."""
    files, world = _nested(config, ["data", "files"]), _nested(config, ["data", "world"])
    pairs = {}
    if files:
        pairs = {"Corpus": files.get("corpus"), "Training questions": files.get("train")}
        pairs |= {"Dev questions": files.get("dev")}
    elif world is not None:
        pairs = {"Corpus": f"synthetic, seed {world.get('seed', 0)}, size {world.get('size', 240)}"}
    index = _nested(config, ["index"]) or {}
    source = index.get("encoder") or index.get("retrievers") or index.get("url")
    pairs["Retriever"] = ", ".join(map(str, filter(None, (index.get("kind"), source))))
    pairs |= {
        "Frozen language model": _model(config.get("llm")),
        "Judge": _model(config.get("judge")),
    }
    return {name: str(value) for name, value in pairs.items() if value}


def _model(section: Any) -> str:
    """The kind, name and address of a frozen model; empty for none."""
    section = section or {}
    if section.get("kind") == "none":
        return ""
    return ", ".join(str(section[key]) for key in ("kind", "model", "base_url") if section.get(key))


def results(run: RunData) -> dict[str, str]:
    """The score of the test questions, if a run has it, and its first, best and last dev scores."""
    # Only some commands evaluate the test questions, and a run may have no dev scores yet.
    pairs = {}
    scores_by_system = _numbers(run.summary.get("accuracy") or {})
    if "trained" in scores_by_system:
        pairs["Test result"] = f"{percent(run.summary) * scores_by_system['trained']:.1f} %"
    scores = curve(run.metrics, "eval/accuracy")
    points = [f"{100 * y:.1f} % (step {x:g})" for x, y in zip(*scores, strict=True)]
    if points:
        best = max(range(len(points)), key=lambda i: scores.values[i])
        text = " → ".join(dict.fromkeys((points[0], points[-1]))) + f", best {points[best]}"
        if scores.values[-1] < scores.values[best]:
            text += ", whose policies RUN@best has"
        if best == 0 < len(points) - 1 and scores.steps[0] == 0:
            text += ": training did not improve the score"
        pairs["Dev score"] = text
    return pairs


def _nested(values: Any, keys: Sequence[str]) -> Any:
    """The value under nested keys; None if a key is missing."""
    for key in keys:
        values = values.get(key) if isinstance(values, Mapping) else None
    return values


def duration(seconds: float) -> str:
    """Seconds in hours, minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{seconds:.3g} s"


def outcomes(summary: Mapping[str, Any]) -> str:
    """Counts of how the rollouts of the test questions ended, the most frequent first."""
    counts = _numbers(summary.get("ended") or {})
    return ", ".join(f"{k} {counts[k]}" for k in sorted(counts, key=lambda k: -counts[k]))


def percent(summary: Mapping[str, Any]) -> float:
    """The factor that converts the summary's accuracies to percent: 1 if they are in percent."""
    return 1.0 if "percent" in str(summary.get("metric")) else 100.0


def accuracy(summary: Mapping[str, Any]) -> Markup | None:
    """A bar chart with one bar per system."""
    values, unit = summary.get("accuracy") or {}, percent(summary)
    bars = [
        charts.Bar(system_title(key), unit * float(value), key == "trained")
        for key, value in values.items()
        if is_number(value)
    ]
    return charts.bar_chart(bars) if bars else None


def system_title(row: str) -> str:
    """The title of a row of the summary, such as `warm_start` or `trained: always Planning`."""
    name, colon, strategy = row.partition(":")
    return SYSTEMS.get(name, name) + colon + strategy


def gain(summary: Mapping[str, Any], key: str = "gain") -> dict[str, Any] | None:
    """The gain in points with its interval; `over` is the system it is compared with, if known.

    `key` is that of the summary: `gain`, `gain_over_fixed` or `gain_over_supervised`.
    """
    values = summary.get(key) or {}
    numbers = [values.get("mean"), *(values.get("ci95") or ())]
    if len(numbers) != 3 or not all(map(is_number, numbers)):
        return None
    mean, low, high = (percent(summary) * float(x) for x in numbers)
    over = system_title(values.get("over") or "")
    return {
        "mean": f"{mean:+.1f}",
        "ci": f"{low:+.1f} to {high:+.1f}",
        "over": over[:1].lower() + over[1:],
        "picture": charts.interval_chart(mean, low, high),
    }


def reward(run: RunData) -> dict[str, Any] | None:
    """The mean reward over steps, its moving average, and the accuracies during training."""
    own, accuracies = curve(run.metrics, "reward/own"), curve(run.metrics, "eval/accuracy")
    # Forced branches have their share of the leaves, however much the policy learns.
    rewards = own if own.steps else curve(run.metrics, "reward/mean")
    if not rewards.steps:
        return None
    average = charts.smooth_curve(rewards)
    lines = [charts.Line("reward", rewards, faint=True), charts.Line("", average)]
    if accuracies.steps:
        lines.append(charts.Line("accuracy", accuracies, "c1", dots=True))
    picture = charts.line_chart(lines, "Mean reward over training steps")
    return {"picture": picture, "is_own": bool(own.steps), "has_accuracy": bool(accuracies.steps)}


def strategies(run: RunData) -> dict[str, Any] | None:
    """Shares of strategies on dev and test questions, and the mean rewards of strategies.

    A strategy has the same color in all three pictures, given by its position in `names`. Some
    strategies occur in rollouts only, because they were forced or sampled.
    """
    test_shares = _numbers(run.summary.get("strategy_share") or {})
    dev_names = [key.removeprefix(SHARE) for key in keys_under(run.metrics, SHARE)]
    names = list(dict.fromkeys([*dev_names, *test_shares]))
    # Those of rollouts only, the ones with the most steps first.
    counts = {key: len(curve(run.metrics, key).steps) for key in keys_under(run.metrics, REWARD)}
    by_count = [key.removeprefix(REWARD) for key in sorted(counts, key=lambda k: -counts[k])]
    names += [name for name in by_count if name not in names][: max(COLORS - len(names), 0)]
    shares = _shares(run, names)
    if not shares:
        return None
    rewards = [
        charts.Line(name, charts.smooth_curve(c, min_span=1), f"c{i % COLORS}")
        for i, name in enumerate(names)
        if (c := curve(run.metrics, f"{REWARD}{name}")).steps
    ]
    size = {"width": charts.HALF if rewards else charts.FULL, "height": 230}
    bar = {name: test_shares.get(name, 0.0) for name in names}
    return {
        "names": names,
        "picture": charts.stacked_areas(shares, "Shares of strategies", **size),
        "rewards": charts.line_chart(rewards, "Reward by strategy", **size) if rewards else None,
        "test": charts.share_bar(bar, "Strategies on the test questions") if test_shares else None,
    }


def _shares(run: RunData, names: Sequence[str]) -> dict[str, Curve]:
    """The share of each strategy at the steps that logged any; a missing share is 0."""
    keys = [f"{SHARE}{name}" for name in names]
    rows = [row for row in run.metrics if any(is_number(row.get(key)) for key in keys)]
    if not rows:  # a system without strategies
        return {}
    full_rows = [{**dict.fromkeys(keys, 0.0), **_numbers(row)} for row in rows]
    pairs = zip(names, keys, strict=True)
    return {name: charts.smooth_curve(curve(full_rows, key), min_span=1) for name, key in pairs}


def _numbers(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if is_number(value)}


def panels(run: RunData) -> list[dict[str, Any]]:
    """Small charts of the leading indicators that the run logged, with title and latest value.

    If a run has several policies, their metrics begin with the name of the policy.
    """
    all_keys = keys_under(run.metrics, "")
    keys = [key for small in SMALL for key in all_keys if _without_policy(key).startswith(small)]
    curves = {key: curve(run.metrics, key) for key in keys if _without_policy(key) not in REDUNDANT}
    parts = []
    for key, values in curves.items():
        if values.steps:
            share, title = key.startswith("valid_frac/"), _title(key)
            # The moving average, because single steps are noisy.
            last = charts.smooth_curve(values).values[-1]
            number = f"{last:.4f}" if abs(last) < 1 else f"{last:.3g}"
            picture = charts.small_chart(values, title, share=share)
            latest = f"{100 * last:.1f} %" if share else number
            parts.append({"title": title, "latest": latest, "picture": picture})
    return parts


def _without_policy(key: str) -> str:
    """A metric's name without the name of its policy."""
    policy, _, rest = key.partition("/")
    # "kl/mean" has no policy: its first part is the name of a metric.
    return rest if rest.startswith(SMALL) and not key.startswith(SMALL) else key


def _title(key: str) -> str:
    """A metric's title, with its role and, in parentheses, its policy."""
    name = _without_policy(key)
    suffix = f" ({key.removesuffix('/' + name)})" if name != key else ""
    if name in TITLES:
        return TITLES[name] + suffix
    prefix = next((p for p in ROLE_TITLES if name.startswith(p)), "")
    title = f"{ROLE_TITLES[prefix]}: {name.removeprefix(prefix)}" if prefix else name
    return title + suffix


def failures(run: RunData) -> list[tuple[str, str, str, str, str]]:
    """Kinds of failures in rollouts: name, sentence, counts of the first, last and all steps."""
    if not run.metrics:
        return []
    rows, faults = [], known_faults(str(run.config.get("system", "")))
    for prefix, name in FAILURES.items():
        for key in keys_under(run.metrics, prefix):
            first, last = (run.metrics[i].get(key, 0) for i in (0, -1))
            counts = [first, last, sum(curve(run.metrics, key).values)]
            kind = key.removeprefix(prefix)
            rows.append((f"{name}: {kind}", explain(kind, faults), *(f"{n:.0f}" for n in counts)))
    return rows  # type: ignore[return-value]


def times(run: RunData) -> list[tuple[str, str, str, str]]:
    """The times of a step: name, mean seconds, total, share of the steps."""
    curves = {key: curve(run.metrics, key) for key in keys_under(run.metrics, "time/")}
    totals = {key: sum(c.values) for key, c in curves.items() if c.steps}
    whole = totals.get(STEP_TIME) or 1.0  # avoids a division by zero
    order = [key for key in TIMES if key in totals] + [key for key in totals if key not in TIMES]
    return [
        (
            TIMES.get(key, key.removeprefix("time/").removesuffix("_s").replace("_", " ")),
            f"{totals[key] / len(curves[key].values):.2f} s",
            duration(totals[key]),
            f"{100 * totals[key] / whole:.0f} %",
        )
        for key in order
    ]


def costs(summary: Mapping[str, Any]) -> dict[str, Any] | None:
    """The summary's `costs` per answer, `{system: {column: number}}`, as header and rows."""
    table = {k: v for k, v in (summary.get("costs") or {}).items() if isinstance(v, Mapping)}
    columns = list(dict.fromkeys(column for row in table.values() for column in row))
    if not columns:
        return None
    rows = [
        (system_title(name), [_cell(row.get(c)) for c in columns]) for name, row in table.items()
    ]
    return {"columns": [c.replace("_", " ") for c in columns], "rows": rows}


def _cell(value: Any) -> str:
    if not is_number(value):
        return "–" if value is None else str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def forests(run: RunData, scale: Scale) -> list[dict[str, Any]]:
    """The stored trees in two groups: those whose leaves differ in reward, and the others.

    Each group has its `title`, `trees`, and the number of trees that are `left_out` of the report.
    """
    trees = stored_trees(run.trees)
    views = [_tree(tree, f"t{i}", scale) for i, tree in enumerate(trees[:MAX_TREES])]
    groups = {"Leaves differ": True, "Leaves agree": False}
    return [
        {
            "title": title,
            "trees": [v for v, t in zip(views, trees, strict=False) if (spread(t) > 0) == differs],
            "left_out": sum((spread(tree) > 0) == differs for tree in trees[MAX_TREES:]),
        }
        for title, differs in groups.items()
        if any((spread(tree) > 0) == differs for tree in trees)
    ]


def _tree(tree: Mapping[str, Any], anchor: str, scale: Scale) -> dict[str, Any]:
    """The tree of one question for the template; `reward` is the mean of its leaves."""
    roots, leaf_rewards = build_tree(tree["nodes"]), rewards(tree)
    return {
        "anchor": anchor,
        "step": tree["step"],
        "question": str(tree.get("question", "")),
        "answers": " · ".join(map(str, tree.get("answers") or ())),
        "hops": tree.get("hops"),
        "roots": roots,
        "picture": draw_tree(roots, scale, anchor),
        "leaves": sum(node["role"] == LEAF for node in tree["nodes"]),
        "reward": sum(leaf_rewards) / max(len(leaf_rewards), 1),
        "spread": spread(tree),
        "credit": largest_credit(tree),
    }
