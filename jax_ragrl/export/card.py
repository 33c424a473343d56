"""The model card of an exported policy: README.md with the front matter that the Hub reads.

A card holds facts of the run folder alone. Paths and addresses of servers are left out, because a
card is published.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jax_ragrl.config.schema import local
from jax_ragrl.config.snapshot import load_saved_config
from jax_ragrl.errors import UserError
from jax_ragrl.models.by_name import SMOLLM2, local_model
from jax_ragrl.models.config import TINY
from jax_ragrl.retrieval.kinds import (
    LISTWISE,
    BM25Index,
    Index,
    OwnIndex,
    PipelineIndex,
    VectorIndex,
)
from jax_ragrl.run.config import Job
from jax_ragrl.runtime.hub import is_uri, parse_data_file
from jax_ragrl.runtime.jsonl import read_rows
from jax_ragrl.systems.registry import PAPERS
from jax_ragrl.version import __version__
from jax_ragrl.warmstart.unfinished import MODEL

CARD = "README.md"
WARM_START = ", after a warm start"
TAGS = ("jax_ragrl", "retrieval-augmented-generation", "reinforcement-learning")
LICENSE_KEYS = ("license", "license_name", "license_link")
APACHE = {"license": "apache-2.0"}
SMOLLM2_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
FUSIONS = {"rrf": "reciprocal rank fusion", "weighted": "weighted sum of the scores"}
ROWS = {
    "direct": "the frozen model without retrieval",
    "standard_rag": "the frozen model with one search (standard RAG)",
    "warm_start": "this system before training",
    "trained": "this system after training",
    "supervised": "this system, trained on labels for the same time",
}


@dataclasses.dataclass(frozen=True)
class Base:
    """The model that training started from.

    Fields:
      label: its name for readers.
      hub_name: `OWNER/NAME` on the Hub; empty if unknown.
      license: the front matter's license keys; empty if unknown.
      is_parent: whether `hub_name` has other weights, from which a local folder derives.
    """

    label: str
    hub_name: str = ""
    license: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    is_parent: bool = False

    @property
    def own_name(self) -> str:
        """The name by which every machine loads these weights; empty if there is none."""
        # On the weights that its base derives from, an adapter would be an untrained policy.
        return "" if self.is_parent else self.hub_name


@dataclasses.dataclass(frozen=True)
class CardFacts:
    """The facts of a card.

    `values` is the config of the run as JSON values, and `result` are its `result_lines`.
    `adapter`: the export is a LoRA adapter alone. `name` is that by which readers load the model,
    and `thinking` is `on` or `off` in training, or empty if the chat template does not know
    thinking.
    """

    job: Job
    values: Mapping[str, Any]
    policy: str
    base: Base
    steps: int
    result: Sequence[str]
    adapter: bool
    name: str
    thinking: str = ""


def base_model(model: str, folder: Path) -> Base:
    """Returns what is known of a run's initial model; the card in `folder` says its origin."""
    if model == TINY:
        return Base("the tiny policy that ships with jax_ragrl", license=APACHE)
    if model == SMOLLM2:
        return Base(SMOLLM2_NAME, SMOLLM2_NAME, APACHE)
    card = read_front_matter(folder / CARD)
    terms = {key: str(card[key]) for key in LICENSE_KEYS if card.get(key)}
    if local_model(model) is None:
        return Base(model, model.partition("@")[0], terms)
    if (start := _warm_start_of(folder)) is not None:
        return start
    origin = card.get("base_model")
    # A card may list several models, as that of a merge does.
    parent = origin if isinstance(origin, str) else ""
    return Base(local(model).name, parent, terms, is_parent=bool(parent))


def _warm_start_of(folder: Path) -> Base | None:
    file = folder.resolve().parent / "config.json"
    values = load_saved_config(file) if folder.name == MODEL and file.is_file() else {}
    if "policy" not in values:
        return None
    if not values["policy"]:
        return Base("a new model, after a warm start")
    try:
        model = values["policy"]
        base = base_model(model, local_model(model) or Path())
    except UserError:  # a folder that was moved since, or a relative path
        return None
    label = base.label if base.label.endswith(WARM_START) else base.label + WARM_START
    return dataclasses.replace(base, label=label, is_parent=True)


def read_front_matter(file: Path) -> dict[str, Any]:
    """Returns the front matter of a card; empty if there is no card or it cannot be parsed."""
    import yaml
    from huggingface_hub.repocard import metadata_load

    try:
        return metadata_load(file) or {}
    except (OSError, ValueError, yaml.YAMLError):
        return {}


def front_matter(facts: CardFacts) -> str:
    from huggingface_hub import ModelCardData

    names = {parse_data_file(x).repository for x in _data_names(facts.values) if is_uri(x)}
    # Fields that are None do not appear in the YAML.
    data = ModelCardData(
        base_model=facts.base.hub_name or None,
        datasets=sorted(names) or None,
        library_name="peft" if facts.adapter else "transformers",
        pipeline_tag="text-generation",
        tags=[*TAGS, str(facts.values["system"])],
        **facts.base.license,
    )
    return str(data.to_yaml()).strip()


def _data_names(values: Mapping[str, Any]) -> list[str]:
    files = values.get("data", {}).get("files") or {}
    names = [str(files.get(key) or "") for key in ("train", "dev", "test", "corpus")]
    return [name.strip() for text in names for name in text.split(",") if name.strip()]


def card_text(facts: CardFacts) -> str:
    title = PAPERS.get(str(facts.values["system"]), str(facts.values["system"]))
    kind = "LoRA adapter" if facts.adapter else "model"
    rows = "".join(f"| {name} | {value} |\n" for name, value in training_facts(facts))
    return f"""---
{front_matter(facts)}
---

# {title}, policy `{facts.policy}`

This {kind} plays the roles {_roles(facts)} of {title}, a retrieval-augmented
generation system that was trained with reinforcement learning in jax_ragrl {__version__}.
Alone it does not answer questions: it expects the prompts of its roles (style
`{facts.job.recipe.system.style}`), and the system around it searches and asks a frozen model.

## Training

| | |
|---|---|
{rows}
## Result

{"".join(f"{line}{chr(10)}" for line in facts.result)}
## Load it

{_usage(facts)}
In jax_ragrl, a config of the same system takes it with `--config.policy={facts.name}`; `ragrl ask`,
`ragrl evaluate` and `ragrl serve` then run the whole system.

## License

{_license(facts.base)}
"""


def training_facts(facts: CardFacts) -> Iterator[tuple[str, str]]:
    values, job = facts.values, facts.job
    yield "system", f"`{values['system']}`"
    yield "roles", _roles(facts)
    yield "started from", facts.base.label
    yield "trained weights", "all" if job.lora is None else f"LoRA adapter of rank {job.lora.rank}"
    yield "steps", f"{facts.steps}, each with {job.run.questions_per_step} questions"
    if facts.thinking:
        use = "the chat template does the same unless `enable_thinking` is passed to it"
        if facts.adapter:
            word = "true" if facts.thinking == "on" else "false"
            use = f"pass `enable_thinking={word}` to the chat template of the base model"
        yield "thinking", f"{facts.thinking}; {use}"
    yield "seed", str(job.seed)
    yield "data", data_label(values)
    yield "retriever", _retriever(job.index)
    yield "frozen model", _llm(values.get("llm") or {})
    if job.judge.kind != "none":
        yield "judge of the reward", _llm(values.get("judge") or {})
    yield "jax_ragrl", __version__


def data_label(values: Mapping[str, Any]) -> str:
    """Describes the data of a run: names of data sets, never paths of the machine."""
    files = values.get("data", {}).get("files")
    if not files:
        world = values.get("data", {}).get("world") or {}
        size, seed = world.get("size", 240), world.get("seed", 0)
        return f"generated encyclopedia (`ragrl data world --size {size} --seed {seed}`)"
    names = dict[str, None]()
    for name in _data_names(values):
        path = Path(name)
        is_private = path.is_absolute() or {"..", "~"} & {*path.parts[:1]}
        names[path.name if is_private and not is_uri(name) else name] = None
    return ", ".join(names)


def _roles(facts: CardFacts) -> str:
    policy_of = facts.job.policy_of.items()
    return ", ".join(f"`{role}`" for role, policy in policy_of if policy == facts.policy)


def _retriever(index: Index) -> str:
    if isinstance(index, PipelineIndex):
        parts = [_retriever(section) for section in index.sections]
        text = f"{FUSIONS[index.fuse]} of {'; '.join(parts)}" if len(parts) > 1 else parts[0]
        if not index.rerank:
            return text
        ranker = "the frozen model" if index.rerank == LISTWISE else _public_name(index.rerank)
        return f"{text}; reranked by {ranker}"
    if isinstance(index, BM25Index):
        return f"BM25 (language {index.language})"
    if isinstance(index, VectorIndex):
        return f"{index.kind} search, encoder {_public_name(index.encoder)}"
    if isinstance(index, OwnIndex):
        return f"own retriever {index.retriever}"
    return f"server of kind {index.kind}"


def _llm(section: Mapping[str, Any]) -> str:
    kind = section.get("kind", "world_reader")
    return {
        "world_reader": "rule-based reader of the generated encyclopedia",
        "none": "none",
    }.get(kind) or _public_name(str(section.get("model", TINY)))


def _public_name(model: str) -> str:
    """The name of a model, or the last part of its path on this machine."""
    # A path may contain the names of users or projects, which a card must not publish.
    return Path(model).name if Path(model).exists() or model.startswith(("/", ".")) else model


def _usage(facts: CardFacts) -> str:
    if not facts.adapter:
        return f"""```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{facts.name}")
tokenizer = AutoTokenizer.from_pretrained("{facts.name}")
```
"""
    return f"""```python
from peft import PeftModel
from transformers import AutoModelForCausalLM

base = AutoModelForCausalLM.from_pretrained("{facts.base.own_name or "FOLDER OF THE BASE MODEL"}")
model = PeftModel.from_pretrained(base, "{facts.name}")
```
"""


def _license(base: Base) -> str:
    if not base.license:
        return f"That of {base.label}, from which the weights derive; its card was not available."
    name = base.license.get("license_name") or base.license.get("license", "")
    return f"`{name}`, that of {base.label}, from which the weights derive."


def result_lines(workdir: Path, step: int | None = None) -> list[str]:
    """Returns the result of a run as lines of Markdown, after `step`; None: the newest result.

    The paired comparison of `ragrl quickstart` if the run has one, otherwise a score on development
    questions. Raises `UserError` if the summary cannot be read.
    """
    file = workdir / "summary.json"
    if file.is_file():
        try:
            summary = json.loads(file.read_text(encoding="utf-8"))
            if step in (None, summary["steps"]):
                return _compared(summary)
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise UserError(
                f"{file} is not the summary of a run ({type(error).__name__}: {error}): delete "
                "it, or write it again with 'ragrl quickstart'"
            ) from error
    return _development_score(workdir, step)


def _development_score(workdir: Path, step: int | None) -> list[str]:
    rows = [
        row
        for row in read_rows(workdir / "metrics.jsonl")
        if row.get("eval/accuracy") is not None and step in (None, row.get("step"))
    ]
    if not rows:
        return [f"This {'run' if step is None else 'checkpoint'} was not evaluated."]
    score, at = 100 * rows[-1]["eval/accuracy"], rows[-1]["step"]
    return [
        f"{score:.1f} % on development questions after step {at}, greedy decoding (the headline "
        "score of the system, without an interval: it was measured during training)."
    ]


def _compared(summary: Mapping[str, Any]) -> list[str]:
    gain, scores = summary["gain"], summary["accuracy"]
    (low, high), metric = gain["ci95"], summary["metric"].removesuffix(", percent")
    rows = [f"| {row_label(name)} | {_percent(score)} |" for name, score in scores.items()]
    return [
        f"{metric} on {summary['questions']} held-out questions after {summary['steps']} training "
        "steps, greedy decoding:",
        "",
        f"| | {metric}, % |",
        "|---|---|",
        *rows,
        "",
        f"Gain over {row_label(gain['over'])}: {_percent(gain['mean'])} points, 95 % interval "
        f"{_percent(low)} to {_percent(high)} (bootstrap over {gain['pairs']} paired questions).",
    ]


def row_label(row: str) -> str:
    name, colon, strategy = row.partition(":")  # such as `trained: always Planning`
    return ROWS.get(name, name) + colon + strategy


def _percent(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.1f}"
