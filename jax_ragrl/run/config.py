"""The config of a training run: one dataclass per section of the config file."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from collections.abc import Mapping
from typing import Annotated

from annotated_types import Ge, Le

from jax_ragrl.config.ranges import Count, MeshSizes, Natural, Seed, Share
from jax_ragrl.config.schema import one_of
from jax_ragrl.corpus.chunks import Chunks
from jax_ragrl.corpus.fields import check_fields
from jax_ragrl.errors import UserError
from jax_ragrl.learner.dpo import Preference
from jax_ragrl.learner.objective import Objective
from jax_ragrl.learner.optimizer import Optimizer
from jax_ragrl.learner.packing import Layout
from jax_ragrl.learner.policies import Schedule
from jax_ragrl.llm.kinds import LLM, NoLLMConfig, Thinking, WorldReaderConfig
from jax_ragrl.models.attention import IMPLEMENTATIONS
from jax_ragrl.models.config import REMAT, TINY
from jax_ragrl.models.lora import LoRAConfig
from jax_ragrl.retrieval.kinds import Index, VectorIndex
from jax_ragrl.rollout.costs import FREE, Prices
from jax_ragrl.rollout.engine import Engine
from jax_ragrl.rollout.tools import Tool
from jax_ragrl.run.guards import Guard
from jax_ragrl.sampling.sampler import Shapes
from jax_ragrl.systems.base import Credit, Recipe, check_group_size, masked_credit
from jax_ragrl.text.metrics import METRICS

REMOTE = "remote"  # the kind of an index on a server
REPLY = 512  # maximum new tokens of a frozen local model: no system requests more


@dataclasses.dataclass(frozen=True)
class WorldData:
    """A synthetic corpus with its questions; see `corpus.world.generate`.

    Fields:
      seed: the seed of the generator.
      size: the number of entities.
      famous_fraction: the fraction of facts that the world reader knows without documents.
      hops: the numbers of hops of the questions.
      outdated_relations: relations whose passages are out of date, while the reader knows the
        current facts.
    """

    seed: Seed = 0
    size: Count = 240
    famous_fraction: Share = 0.3
    hops: tuple[Count, ...] = (1, 2, 3, 4)
    outdated_relations: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class FileData:
    """Data files in any of the supported formats (`corpus/formats`).

    Separate several files of questions with commas; see `corpus.mixture.load_mixture`. A file may
    also be one of a data set on the Hugging Face Hub: `hf://datasets/OWNER/NAME[@REVISION]/PATH`.

    Fields:
      corpus: the passages: a file or folder, or several: a folder or pattern of shards, or names
        separated by commas. May be empty if a server is searched.
      train: questions for training.
      dev: questions for evaluation during the run; may be the same file as `train`.
      test: questions for the final evaluation; may be the same file as `train`.
      max_train_per_file: maximum number of questions from each file of `train`; 0: no maximum.
      train_per_file: a mixture: the number of questions from each file of `train`, in the order of
        the files (0: all of a file). Empty: `max_train_per_file` for every file.
      fields: names of fields in these files, if they are not the usual ones (`corpus/formats/own`):
        the keys are `question`, `answer`, `id`, `gold`, `text` and `title`.
    """

    corpus: str
    train: str
    dev: str
    test: str
    max_train_per_file: Natural = 0
    train_per_file: tuple[Natural, ...] = ()
    fields: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self.fields)


@dataclasses.dataclass(frozen=True)
class Data:
    """The data of a run; files take precedence over a synthetic world.

    Fields:
      world: settings of a synthetic corpus.
      files: files of passages and questions.
      chunk: divides long passages of the files; None leaves them whole.
    """

    world: WorldData | None = None
    files: FileData | None = None
    chunk: Chunks | None = None


# The packages of experiment trackers, by the key that has the name of a project.
TRACKERS = {"wandb_project": "wandb", "mlflow_experiment": "mlflow", "trackio_project": "trackio"}


@dataclasses.dataclass(frozen=True)
class Run:
    """The length of a run, and how often it saves, evaluates and stores trees for the report.

    The last step is always saved and evaluated.

    Fields:
      steps: the number of training steps; with `patience` or `token_budget`, the largest number.
      questions_per_step: the number of questions per step.
      refill: the most further rounds of questions in a step. A question is dead if its rollouts all
        earned the same, so that a group rule gives every action the advantage 0. Each round asks as
        many further questions as are dead, and the update leaves out the dead ones. If dead
        questions remain after the last round, the update is on fewer than `questions_per_step`;
        without any other question there is none. 0: dead questions remain in the update.
      prefer_signal: whether questions that were dead before are asked less often in later epochs,
        but never less than once in eight epochs on average; see `corpus.questions.QuestionStream`.
        Every question is asked once before.
      lockstep: whether all branches wait for each other in every round. Without it a
        branch continues as soon as its own replies have arrived, which helps if some replies of a
        language model on other machines take much longer than others; see `rollout.collect`. A
        resumed run then equals an undisturbed one up to rounding errors.
      staleness: with 1, the rollouts of a step are made during the update of the step before, by
        policies that are one update older than those it trains; needs
        `objective.importance_weight_cap`, unless the update is DPO. With 0, an update waits for
        rollouts of the newest policies.
      other_versions: whether a run may continue with another version of JAX than it was begun with.
        It does not end bit-identical then, and the metric `version_changes` marks its later steps.
      save_every: steps between checkpoints.
      eval_every: steps between evaluations on dev questions.
      eval_before_training: whether the policies are also evaluated before the first step, as step
        0 of the metrics. Without it, `RUN@best` is a trained policy even if training made the
        policies worse.
      patience: evaluations without a better score on dev questions after which the run ends; 0:
        it takes all of its steps.
      token_budget: tokens of all actions (`policy_tokens`) after which the run ends, at the end of
        the step that reaches them; 0: no budget. Runs of equal budgets are compared at equal cost.
      dev_questions: the number of dev questions per evaluation.
      test_questions: the number of test questions before and after training (`quickstart`).
      fixed_strategies: whether `quickstart` also evaluates each strategy alone, if the
        system selects a strategy per question.
      save_trees_every: steps between steps whose trees are stored for the report.
      trees_per_save: the number of questions whose trees are stored.
      role_gradients_every: steps between measurements of each role's part in the gradient: norms,
        shares and cosines (`learner/role_gradients.py`). One takes one more backward pass per role.
        0: none.
      baseline_style: the prompt style of the baselines (direct answering and Standard RAG).
      wandb_project: a project of Weights & Biases that also receives the metrics; empty: none.
      mlflow_experiment: an experiment of MLflow, likewise.
      trackio_project: a project of Trackio, likewise.
    """

    steps: Natural
    questions_per_step: Count = 16
    refill: Natural = 0
    prefer_signal: bool = False
    lockstep: bool = True
    staleness: Annotated[int, Ge(0), Le(1)] = 0
    other_versions: bool = False
    save_every: Count = 5
    eval_every: Count = 5
    eval_before_training: bool = True
    patience: Natural = 0
    token_budget: Natural = 0
    dev_questions: Natural = 64
    test_questions: Natural = 300
    fixed_strategies: bool = True
    save_trees_every: Count = 5
    trees_per_save: Natural = 2
    role_gradients_every: Natural = 0
    baseline_style: str = "c3po_tiny"
    wandb_project: str = ""
    mlflow_experiment: str = ""
    trackio_project: str = ""

    def __post_init__(self) -> None:
        for key, package in TRACKERS.items():
            if getattr(self, key) and importlib.util.find_spec(package) is None:
                raise UserError(
                    f"run.{key} is {getattr(self, key)!r}, but {package} is not installed: "
                    f"run 'pip install {package}', or leave the key empty"
                )

    @property
    def projects(self) -> dict[str, str]:
        """The names of the projects of trackers, by key; an empty name stands for none."""
        return {key: getattr(self, key) for key in TRACKERS}


@dataclasses.dataclass(frozen=True)
class Job:
    """The config of a training run; the fields are the sections of its config file.

    Fields:
      run: length of the run, and how often it saves and evaluates.
      recipe: the system with its rewards, credit and exploration; see `load_recipe`.
      objective: the losses and the divergence penalty.
      optimizer: learning rates, epochs and minibatches.
      data: corpus and questions.
      index: the retriever; without this section BM25 for files, hashed words for a world.
      llm: the frozen language model.
      judge: a language model that grades answers. It replaces the system's metric in the reward
        and on dev questions; kind `none`: no judge.
      tools: the tools that the system may call, by name.
      prices: prices of the environment, which give metrics and tables a cost in dollars.
      engine: a server that samples the rollouts of training; None: this process.
      shapes: static shapes of sampling.
      packing: static shapes of training batches.
      policy: the model that all policies start from, by its name (`docs/howto/name_a_model.md`).
      thinking: whether actions of the roles may begin with a think block, for models whose chat
        template knows thinking (Qwen3). `off`: the template is asked for a prompt without
        thinking. `on`: the block is sampled and trained, and removed before the action is parsed.
        Roles that may write certain tokens only (`allowed_token_regex`) never think.
      start_from: a run whose trained policies this run starts from: `RUN`, `RUN@best` (on dev
        questions) or `RUN@STEP`; empty: the run starts from `policy`.
      policies: pairs of a policy or role and a model, empty for that of `policy`. A role that is
        named here has its own policy.
      lora: adapters to train; None: all weights are trained.
      schedule: phases that train some of the roles.
      preference: with it, the update is DPO on pairs of rollouts (`learner/dpo.py`).
      guard: bounds of metrics that report, mend or stop a diverging run.
      compute_dtype: the dtype of forward and backward passes.
      remat: the activations that the backward pass computes again (gradient checkpointing).
      attention: `auto`, the fastest implementation in `models/attention.py`, or `xla`, without a
        kernel.
      mesh: sizes of the axes (data, fsdp, tensor) over all devices; one entry may be -1 for all
        remaining devices. With (-1, -1, n) fsdp is as large as it may be with 128 columns of the
        narrowest policy per device, and data takes the rest. Empty: the first device.
      train_forced: whether forced actions are trained, scored under the current policy.
      seed: the seed of data and training.
    """

    run: Run
    recipe: Recipe
    objective: Objective
    optimizer: Optimizer
    data: Data = Data()
    index: Index = VectorIndex()
    llm: LLM = WorldReaderConfig()
    judge: LLM = NoLLMConfig()
    tools: Mapping[str, Tool] = dataclasses.field(default_factory=dict)
    prices: Prices = FREE
    engine: Engine | None = None
    shapes: Shapes = Shapes()
    packing: Layout = Layout()
    policy: str = TINY
    thinking: Thinking = "off"
    start_from: str = ""
    policies: tuple[tuple[str, str], ...] = ()
    lora: LoRAConfig | None = None
    schedule: Schedule = Schedule()
    preference: Preference | None = None
    guard: Guard = Guard()
    compute_dtype: str = "float32"
    remat: str = "none"
    attention: str = "auto"
    mesh: MeshSizes = ()
    train_forced: bool = True
    seed: Seed = 0

    def __post_init__(self) -> None:
        # Check now, not when a model is built: building the index before that may take hours.
        one_of("compute_dtype", self.compute_dtype, ("float32", "bfloat16"))
        one_of("remat", self.remat, REMAT)
        one_of("attention", self.attention, IMPLEMENTATIONS)
        if self.judge.kind != "none" and not self.recipe.accepts_judge:
            raise UserError(
                f"judge.kind is {self.judge.kind!r}, but the reward of this system does not read "
                "a judge's verdict: set it to none"
            )
        if self.recipe.metric not in METRICS:
            raise UserError(
                f"the recipe's metric is {self.recipe.metric!r}: use one of {', '.join(METRICS)}, "
                "or add it to jax_ragrl.text.metrics.METRICS in the module of the system"
            )
        systems = (self.recipe.system, self.recipe.evaluation_system)
        if not self.recipe.system.roles:
            raise UserError(
                f"the system {type(self.recipe.system).__name__} has no roles, so that there is "
                "nothing to train: evaluate it with 'ragrl evaluate', or give it a role"
            )
        for role in (role for system in systems for role in system.roles.values()):
            tokens, limit = role.sampling.max_tokens, self.shapes.max_new_tokens
            if tokens > limit:
                raise UserError(
                    f"role {role.name} may write {tokens} tokens, but shapes.max_new_tokens is "
                    f"{limit}, which would cut its actions: raise shapes.max_new_tokens, or lower "
                    "the role's tokens"
                )
        self.schedule.roles(0, tuple(self.policy_of))  # refuses unknown roles
        if self.preference is not None:
            self._check_preference()
        elif self.run.staleness and not self.objective.importance_weight_cap:
            raise UserError(
                "run.staleness is 1, but objective.importance_weight_cap is 0: rollouts of the "
                "policies before the last update would count as rollouts of the newest. "
                "Set the cap, for example to 2.0"
            )
        if self.engine is not None:
            self._check_engine(self.engine)
        self._check_credit()

    def _check_engine(self, engine: Engine) -> None:
        roles = self.recipe.system.roles.values()
        masked = [role.name for role in roles if role.strict or role.allowed_token_regex]
        if masked:
            raise UserError(
                f"engine is set, but it cannot sample role {masked[0]}, which may write certain "
                "tokens only: use grammar 'loose' and another system, or no engine"
            )
        if len({role.policy for role in roles}) > 1:
            raise UserError("engine has one model: use one policy for all roles, or no engine")
        if any(role.sampling.top_p < 1 and role.sampling.temperature != 1 for role in roles):
            raise UserError(
                "engine is set with a top_p below 1 and a temperature other than 1, for which no "
                "engine reports the probability before the nucleus filter: set one of them to 1"
            )
        if self.preference is None and not self.objective.importance_weight_cap:
            raise UserError(
                "engine is set, but objective.importance_weight_cap is 0: its probabilities, which "
                "differ from the learner's, would count as equal. Set the cap, for example to 2.0"
            )
        if engine.weights == "adapter" and self.lora is None:
            raise UserError(
                "engine.weights is 'adapter', but lora is not set: use 'model', or train an adapter"
            )

    def _check_preference(self) -> None:
        if self.recipe.width < 2:
            raise UserError(
                "preference compares the actions of one decision, but this system tries one action "
                "per decision: use a system with trees, such as c3po, or leave it out"
            )
        if self.objective.kl.where == "none":
            raise UserError(
                "preference needs a reference, but objective.kl.where is 'none': use reward"
            )
        if self.run.role_gradients_every:
            raise UserError(
                f"run.role_gradients_every is {self.run.role_gradients_every}, but the loss of "
                "preference pairs is not a sum over roles: use 0"
            )

    def _check_credit(self) -> None:
        """Raises `UserError` if the recipe has no credit for the objective, or compares nothing."""
        rule, recipe = self.objective.advantage, self.recipe
        is_group_rule = self.objective.group_rule is not None
        # Preference pairs may also be ordered by returns.
        by_returns = not is_group_rule or self.preference is not None
        if not (recipe.compare and is_group_rule or recipe.credit and by_returns):
            other = "gae or whitened_gae" if is_group_rule else "a group rule with critic 'none'"
            raise UserError(
                f"objective.advantage is {rule!r}, but the credit of this system is not made for "
                f"it: use {other}, or another config.credit (a function of your own "
                "compares groups if it has a parameter 'rule')"
            )
        selects = {"refill": self.run.refill, "prefer_signal": self.run.prefer_signal}
        for key, value in selects.items():
            if value and not (is_group_rule and self.preference is None):
                raise UserError(
                    f"run.{key} is {value}, but only with a group rule and without preference "
                    f"pairs do equal rewards teach nothing: use {type(value)()}, or a group rule "
                    "with critic 'none'"
                )
        if self.objective.gae_span == "conversation" and recipe.turn_credit is None:
            raise UserError(
                "objective.gae_span is 'conversation', but no turn of this system continues "
                "another: use 'turn'"
            )
        # A group rule compares siblings, or else rollouts: there must be several of one of them.
        if is_group_rule and recipe.width < 2:
            check_group_size("rollouts", recipe.rollouts)

    @property
    def policy_of(self) -> dict[str, str]:
        """The name of the policy of each role."""
        return {name: role.policy for name, role in self.recipe.system.roles.items()}

    @property
    def credit(self) -> Credit:
        """The credit of the recipe that fits the objective, without nodes not to be trained."""
        recipe, credit, rule = self.recipe, self.recipe.credit, self.objective.group_rule
        if rule is not None and recipe.compare is not None:
            credit = functools.partial(recipe.compare, rule=rule)
        if recipe.turn_credit is not None and self.objective.gae_span == "conversation":
            credit = recipe.turn_credit
        assert credit is not None, "see _check_credit"
        if recipe.trainable is None:
            return credit
        return functools.partial(masked_credit, credit, recipe.trainable)

    @property
    def temperature(self) -> float:
        """The sampling temperature of every trained role."""
        # The learner scores with one temperature, the one of sampling.
        temperatures = {role.sampling.temperature for role in self.recipe.system.roles.values()}
        if len(temperatures) != 1:
            values = sorted(temperatures)
            raise UserError(
                f"trained roles are sampled at temperatures {values}, but scoring has one: use one"
            )
        return temperatures.pop()
