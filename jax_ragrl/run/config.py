"""A run as a table of choices: the sections and keys of its config file."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
from collections.abc import Mapping
from typing import Any

from jax_ragrl.config.schema import build, convert, local, one_of
from jax_ragrl.errors import UserError
from jax_ragrl.learner.dpo import Preference
from jax_ragrl.learner.objective import ESTIMATED, GROUPED, Objective
from jax_ragrl.learner.optimizer import Optimizer
from jax_ragrl.learner.packing import Layout
from jax_ragrl.learner.policies import Schedule
from jax_ragrl.models.attention import IMPLEMENTATIONS
from jax_ragrl.models.by_name import TINY
from jax_ragrl.models.config import REMAT
from jax_ragrl.models.lora import LoRAConfig
from jax_ragrl.retrieval.embed import DTYPES
from jax_ragrl.retrieval.index import KINDS
from jax_ragrl.retrieval.web import ENGINES
from jax_ragrl.run.evaluate import METRICS
from jax_ragrl.run.guards import Guard
from jax_ragrl.sampling.sampler import Shapes
from jax_ragrl.systems import c3po, coda, mao_arag, mmoa_rag
from jax_ragrl.systems.ablation import OWN, crossed, with_own_policies
from jax_ragrl.systems.base import Credit, Recipe, two_or_more
from jax_ragrl.systems.opera import system as opera

REMOTE = "remote"  # the kind of an index that another machine holds
REPLY = 512  # tokens of a reply: no system asks more of a frozen language model


@dataclasses.dataclass(frozen=True)
class WorldData:
    """The generated encyclopedia; see `corpus.world.generate`."""

    seed: int = 0
    size: int = 240
    famous: float = 0.3
    hops: tuple[int, ...] = (1, 2, 3, 4)


@dataclasses.dataclass(frozen=True)
class FileData:
    """Files in any known format; `dev` and `test` may be the same file as `train`.

    `corpus` may be empty where a server is searched. Several files of questions have commas between
    them, and give theirs in turns; `train_each`, if not 0, is the most that are drawn from a file
    of `train`. See `corpus.questions.load_mixture`.
    """

    corpus: str
    train: str
    dev: str
    test: str
    train_each: int = 0


@dataclasses.dataclass(frozen=True)
class Data:
    """A generated world, or files: these where both are given."""

    world: WorldData | None = None
    files: FileData | None = None


@dataclasses.dataclass(frozen=True)
class Index:
    """How the corpus is searched. `folder` is opened where it exists, else made there, with vectors
    in `dtype` (see `retrieval.index.build_index`).

    The kind `remote` asks the server at `url` (`retrieval/remote.py`) and reads nothing else. So do
    `serper` and `searxng`, search engines of the web, which keep what they found in `folder`.
    `retries` and `timeout` (seconds) are for both.
    """

    encoder: str = "lexical"
    kind: str = "scann"
    dtype: str = "float32"
    folder: str = ""
    url: str = ""
    retries: int = 5
    timeout: float = 60.0

    def __post_init__(self) -> None:
        one_of("index.kind", self.kind, (*KINDS, REMOTE, *ENGINES))
        one_of("index.dtype", self.dtype, DTYPES)
        home = ENGINES[self.kind].url if self.kind in ENGINES else ""
        if (self.kind in KINDS) == bool(self.url or home):
            raise UserError(
                f"index.kind is {self.kind!r} and index.url is {self.url!r}: give the address of a "
                f"server to the kinds {REMOTE} and {', '.join(ENGINES)}, and to no other"
            )
        if self.folder:
            local(self.folder)


@dataclasses.dataclass(frozen=True)
class LLM:
    """The frozen language model: `world_reader`, `local` (see `resolve_model`), `openai`, `none`.

    A local one is kept, and computes, in `dtype`; `int8` gives it eight-bit weights (needs Qwix). A
    policy in training keeps its own: what it samples has to be what is scored. A local one writes
    up to `REPLY` tokens, however few `shapes.steps` allows the actions of a policy. `concurrency`
    requests at once, `retries`, `timeout` (seconds) and `extra` are for `openai`, see `llm.openai`.
    """

    kind: str = "world_reader"
    model: str = TINY
    base_url: str | None = None
    documents: int = 5  # how many the world reader reads
    noise: float = 0.1
    confusion: float = 0.35
    int8: bool = False
    dtype: str = "float32"
    concurrency: int = 32
    retries: int = 5
    timeout: float = 60.0
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        one_of("llm.kind", self.kind, ("world_reader", "local", "openai", "none"))
        if self.int8 and self.kind != "local":
            raise UserError(f"llm.int8 is for llm.kind local, but this is {self.kind!r}: unset it")


@dataclasses.dataclass(frozen=True)
class Run:
    """How long a run is, and how often it saves, evaluates and keeps trees for the report.

    `baselines` is the prompt style of direct answering and Standard RAG, which it is compared with.
    The last step is always saved and evaluated. In several `cohorts` the questions of a step are
    rolled out side by side: worth it where the devices would wait for a retriever or a language
    model elsewhere (see `pipelining`). `wandb` is a project of Weights & Biases, which is to be
    told the metrics too.
    """

    steps: int
    questions: int = 16
    cohorts: int = 1
    save_every: int = 5
    eval_every: int = 5
    dev_questions: int = 64
    test_questions: int = 300
    trees_every: int = 5
    trees: int = 2
    baselines: str = "c3po_tiny"
    wandb: str = ""

    def __post_init__(self) -> None:
        if self.wandb and importlib.util.find_spec("wandb") is None:
            raise UserError(
                f"run.wandb is {self.wandb!r}, but Weights & Biases is not installed: "
                "'pip install wandb', or leave it out"
            )
        for name in ("questions", "cohorts", "save_every", "eval_every", "trees_every"):
            if getattr(self, name) < 1:
                raise UserError(
                    f"run.{name} is {getattr(self, name)}: give at least 1; what is done every so "
                    "many steps is done after the last alone where this is more than run.steps"
                )
        if self.steps < 0:
            raise UserError(f"run.steps is {self.steps}: give at least 0")


@dataclasses.dataclass(frozen=True)
class Job:
    """A whole training run; the fields are the sections of its config file.

    `policy` is the folder that every policy of the system starts from, except those that `policies`
    names (pairs of policy and folder); a role that is named there has a policy of its own. With
    `lora` their adapters alone are trained. `train_forced` keeps actions that were forced in the
    update, scored under the current policy. A `judge` is a language model that grades answers in
    the place of the system's own metric, as the reward and on dev questions; kind `none` is none.
    With `preference` the update is DPO on pairs of the rollouts instead (`dpo.py`). `compute`
    and `remat` are the dtype of forward and backward passes and what the latter computes again;
    `attention` names one of `models/attention.py`, such as `xla`, which has no kernel.
    `mesh` is (data, fsdp, tensor) over all devices, one entry may be -1 for what is left; without
    it a run takes the first device.
    """

    run: Run
    recipe: Recipe
    objective: Objective
    optimizer: Optimizer
    data: Data = Data()
    index: Index = Index()
    llm: LLM = LLM()
    judge: LLM = LLM("none")
    shapes: Shapes = Shapes()
    layout: Layout = Layout()
    policy: str = TINY
    policies: tuple[tuple[str, str], ...] = ()
    lora: LoRAConfig | None = None
    schedule: Schedule = Schedule()
    preference: Preference | None = None
    guard: Guard = Guard()
    compute: str = "float32"
    remat: str = "none"
    attention: str = "auto"
    mesh: tuple[int, ...] = ()
    train_forced: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        # Now, and not where a model is made, after the index: a mistake costs nothing yet.
        one_of("compute", self.compute, ("float32", "bfloat16"))
        one_of("remat", self.remat, REMAT)
        one_of("attention", self.attention, IMPLEMENTATIONS)
        if self.judge.kind != "none" and not self.recipe.judged:
            raise UserError(
                f"judge.kind is {self.judge.kind!r}, but this system's reward takes no judge's "
                "verdict: set it to none"
            )
        if self.recipe.metric not in METRICS:
            raise UserError(
                f"the recipe's metric is {self.recipe.metric!r}: use one of {', '.join(METRICS)}, "
                "or add it to jax_ragrl.run.evaluate.METRICS in the module of the system"
            )
        systems = (self.recipe.system, self.recipe.evaluated)
        for role in (role for system in systems for role in system.roles.values()):
            asked, most = role.sampling.max_tokens, self.shapes.steps
            if asked > most:
                raise UserError(
                    f"role {role.name} may write {asked} tokens, but shapes.steps is {most}, where "
                    "its actions would be cut: raise shapes.steps, or lower the role's tokens"
                )
        roles = tuple(self.policy_of)
        self.schedule.roles(0, roles)  # both refuse a role that is not there
        self.objective.weights_of(roles)
        if self.preference is None:
            self._check_credit()

    def _check_credit(self) -> None:
        """`UserError` where the recipe has no credit for the objective, or compares nothing."""
        rule, recipe = self.objective.advantage, self.recipe
        wanted = tuple(recipe.advantages) or ESTIMATED
        if rule not in wanted:
            raise UserError(
                f"objective.advantage is {rule!r}, which the credit of this system cannot be made "
                f"into: use {' or '.join(wanted)}, or another config.credit (systems/ablation.py)"
            )
        if self.objective.span == "conversation" and recipe.turns is None:
            raise UserError(
                "objective.span is 'conversation', but no turn of this system continues another: "
                "use span 'turn'"
            )
        if rule in GROUPED and recipe.width < 2:
            two_or_more("rollouts", recipe.rollouts)

    @property
    def policy_of(self) -> dict[str, str]:
        """The policy of each role."""
        return {name: role.policy for name, role in self.recipe.system.roles.items()}

    @property
    def credit(self) -> Credit:
        """The recipe's credit, as the objective wants it."""
        if self.recipe.turns is not None and self.objective.span == "conversation":
            return self.recipe.turns
        return self.recipe.advantages.get(self.objective.advantage, self.recipe.credit)

    @property
    def temperature(self) -> float:
        """The sampling temperature of every trained role."""
        found = {role.sampling.temperature for role in self.recipe.system.roles.values()}
        if len(found) != 1:
            raise UserError(f"trained roles are sampled at temperatures {sorted(found)}: use one")
        return found.pop()


SYSTEMS: Mapping[str, Any] = {
    "c3po": c3po,
    "coda": coda,
    "mao_arag": mao_arag,
    "mmoa_rag": mmoa_rag,
    "opera": opera,
}


def load_job(values: Mapping[str, Any]) -> Job:
    """A job from the values of a config: `system` names a paper, `recipe` holds its settings."""
    values = dict(values)
    return build(Job, {"recipe": load_recipe(values), **values})


def system_module(name: str) -> Any:
    """The module of a system: one of `SYSTEMS`, or any by its dotted name.

    It has a dataclass `Settings` and a function `recipe` from one to a `Recipe`.
    """
    if name in SYSTEMS:
        return SYSTEMS[name]
    try:
        return importlib.import_module(name)
    except (ImportError, ValueError) as error:
        known = ", ".join(SYSTEMS)
        raise UserError(
            f"config.system is {name!r}: use {known}, or the dotted name of a module ({error})"
        ) from error


def load_recipe(values: dict[str, Any]) -> Recipe:
    """The recipe of a config; the keys that make it are taken out of `values`.

    These are `system`, `recipe`, and `credit` and `rollouts`, which `systems.ablation` explains, as
    it does what `policies` says of roles.
    """
    name, given = values.pop("system", None), values.pop("recipe", {})
    credit, rollouts = values.pop("credit", OWN), values.pop("rollouts", 0)
    if not isinstance(rollouts, int) or rollouts < 0:
        raise UserError(f"config.rollouts is {rollouts!r}: give a number of them, or 0")
    module = system_module(str(name))
    if missing := [part for part in ("Settings", "recipe") if not hasattr(module, part)]:
        raise UserError(
            f"config.system is {name!r}, but that module has no {missing[0]}: a system has a "
            "dataclass Settings and a function recipe(settings), as CONTRIBUTING.md shows"
        )
    recipe: Recipe = module.recipe(build(module.Settings, given, "config.recipe"))
    pairs = convert(tuple[tuple[str, str], ...], values.get("policies", ()), "config.policies")
    recipe = with_own_policies(recipe, [name for name, _ in pairs])
    return crossed(recipe, str(credit), rollouts)


def parse_index(text: str) -> Index:
    """A retriever named in a word: the address of a server, or `ENGINE[@URL]`."""
    name, _, url = text.partition("@")
    return Index(kind=name, url=url) if name in ENGINES else Index(kind=REMOTE, url=text)


SERVER = "openai:"


def parse_llm(text: str, *, int8: bool = False) -> LLM:
    """A frozen language model by its name: any of `resolve_model`, or
    `openai:MODEL[@URL][#EXTRA]`, in which EXTRA is `llm.extra` as JSON.

    Raises:
      UserError: EXTRA is no JSON object.
    """
    if not text.startswith(SERVER):
        return LLM("local", text, int8=int8)
    model, url, extra = _served(text)
    return LLM("openai", model, url or None, int8=int8, extra=_object(extra or "{}"))


def model_of(text: str) -> str:
    """What `parse_llm` reads without the address of a server, which may move."""
    if not text.startswith(SERVER):
        return text
    model, _, extra = _served(text)
    return f"{SERVER}{model}" + (f"#{extra}" if extra else "")


def _served(text: str) -> tuple[str, str, str]:
    """Model, address and extra of `openai:MODEL[@URL][#EXTRA]`; empty where not given."""
    place, _, extra = text.removeprefix(SERVER).partition("#")
    model, _, url = place.partition("@")
    return model, url, extra


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        value = None
    if not isinstance(value, dict):
        raise UserError(f'what follows # is {text!r}: give a JSON object, such as {{"top_k": 20}}')
    return value
