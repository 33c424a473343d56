"""Gives the engine of a run (`rollout.engine`) the weights of its policy, by the user's command."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import jax

from jax_ragrl.errors import UserError
from jax_ragrl.learner.policies import Policies
from jax_ragrl.learner.state import trained_decoder
from jax_ragrl.llm.openai import OpenAILLM
from jax_ragrl.models.decoder import Decoder
from jax_ragrl.models.gguf_export import write_gguf
from jax_ragrl.models.hf import save_decoder
from jax_ragrl.models.lora import merge_lora
from jax_ragrl.models.peft import save_lora
from jax_ragrl.rollout.engine import EngineSampler
from jax_ragrl.run.config import Job
from jax_ragrl.run.models import initial_models, policy_folder
from jax_ragrl.sampling.sampler import JobSampler
from jax_ragrl.text.tokenizer import ChatTokenizer

WORDS = 400  # characters of a command's last words, in an error


class Handover:
    """Hands over weights before the rollouts of every step, the first of which is `start`."""

    def __init__(self, job: Job, tokenizer: ChatTokenizer, workdir: Path, start: int) -> None:
        assert job.engine is not None, "made for an engine only"
        if jax.process_count() > 1:
            raise UserError(
                f"engine is set, but the run has {jax.process_count()} processes, and each would "
                "give it weights: use one process, or no engine"
            )
        engine = self._engine = job.engine
        (name,) = {role.policy for role in job.recipe.system.roles.values()}
        self._policy, self._model = name, initial_models(job)[name]
        limits: dict[str, Any] = {"concurrency": engine.concurrency, "retries": engine.retries}
        client = OpenAILLM(engine.model, engine.base_url, timeout=engine.timeout, **limits)
        self._sampler = EngineSampler(client, engine.base_url, tokenizer)
        self._root, self._step = workdir / "engine", start

    def samplers(self, policies: Policies) -> dict[str, JobSampler | EngineSampler]:
        """Returns the sampler of the policy, once per step and before its rollouts.

        Raises `UserError` if the command fails.
        """
        self._hand_over(trained_decoder(policies[self._policy]))
        self._step += 1
        return {self._policy: self._sampler}

    def _hand_over(self, decoder: Decoder) -> None:
        folder = self._root / str(self._step)
        shutil.rmtree(folder, ignore_errors=True)  # a killed run may have left it
        if self._engine.weights == "adapter":
            save_lora(decoder, folder)
        else:
            plain = decoder if decoder.adapter is None else merge_lora(decoder)
            save_decoder(plain, folder, policy_folder(self._model), dtype=self._engine.dtype)
        if self._engine.weights == "gguf":
            write_gguf(folder)
        command = [*shlex.split(self._engine.sync), str(folder.resolve()), str(self._step)]
        # To a file: a pipe would stay open in an engine that the command starts.
        with tempfile.TemporaryFile("w+") as out:
            try:
                subprocess.run(command, check=True, stdout=out, stderr=subprocess.STDOUT)
            except (OSError, subprocess.CalledProcessError) as error:
                out.seek(0)
                raise UserError(
                    f"engine.sync failed ({error}), its last words: {out.read()[-WORDS:]!r}; mend "
                    "the command, then start the run again"
                ) from error
        for other in self._root.iterdir():
            if other != folder:
                shutil.rmtree(other)
