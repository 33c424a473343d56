"""Exports a policy of a run: weights, tokenizer, model card and, if asked, an upload to the Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jax_ragrl.config.snapshot import load_saved_config
from jax_ragrl.errors import UserError
from jax_ragrl.export.card import CARD, CardFacts, base_model, card_text, result_lines
from jax_ragrl.export.publish import reserve, upload
from jax_ragrl.export.thinking import set_thinking_default, thinking_of
from jax_ragrl.export.weights import export, export_adapter
from jax_ragrl.models import gguf_file
from jax_ragrl.models.by_name import local_model
from jax_ragrl.models.gguf_export import write_gguf
from jax_ragrl.models.hf import check_new
from jax_ragrl.run.checkpoint_name import NEWEST, parse_run
from jax_ragrl.run.config import Job
from jax_ragrl.run.inference import trained_policies
from jax_ragrl.run.load import load_job
from jax_ragrl.run.models import initial_models, load_policies, policy_folder
from jax_ragrl.runtime.caches import DRAFT, draft_folder, write_text


def export_run(
    workdir: Path,
    out: Path,
    *,
    policy: str = "",
    dtype: str = "bfloat16",
    adapter: bool = False,
    gguf: bool = False,
    push_to: str = "",
    public: bool = False,
) -> dict[str, Any]:
    """Exports a policy of a run.

    Args:
      policy: the name of a policy; empty if the run has one.
      dtype: the dtype of the weights.
      adapter: export only the LoRA adapter.
      gguf: also write `model.gguf` (see `models.gguf_export`).
      push_to: a repository on the Hub, which everyone may read if it is `public`; empty: no upload.

    Returns:
      The fields of `ExportResult` and, after an upload, `url` and `private`.

    Raises:
      UserError: there is no such run or policy, the export reads back with other logits, the policy
        cannot be a GGUF file, or the Hub does not accept the upload.
    """
    if gguf:
        gguf_file.check_package("--gguf")
    run = parse_run(workdir)
    values = load_saved_config(run.folder / "config.json")
    job = load_job(values)
    name = policy_name(job, policy)
    # Once: a run in training will have a newer checkpoint by the time of the card.
    step = run.open()[1]
    opened = run._replace(name=str(step)) if run.name == NEWEST else run
    out = check_new(out)
    failure: UserError | None = None
    out.parent.mkdir(parents=True, exist_ok=True)
    # The folder appears with all its files: without the last ones, a policy would be loaded whose
    # chat template renders other prompts than those of training.
    with draft_folder(out.parent, DRAFT) as draft:
        # After the folder, so that no empty repository is left behind.
        target = reserve(push_to, public=public) if push_to else None
        # On one device, because the run's mesh may need a larger machine. In float32, so that
        # merging an adapter loses no precision.
        policies = trained_policies(job, load_policies(job, None, "float32")[0], opened)
        model = initial_models(job)[name]
        folder, decoder = policy_folder(model), policies[name]
        if adapter:
            base = adapter_base(model, folder, is_published=bool(push_to))
            result = export_adapter(decoder, draft / out.name, *base)
        else:
            result = export(decoder, draft / out.name, folder, dtype=dtype)
        thinks = any(r.thinking for r in job.recipe.system.roles.values() if r.policy == name)
        facts = CardFacts(
            job=job,
            values=values,
            policy=name,
            base=base_model(model, folder),
            steps=step,
            thinking=thinking_of(folder, thinks),
            # A run need not be evaluated after its newest step; other checkpoints have other
            # scores.
            result=result_lines(run.folder, None if run.name == NEWEST else step),
            adapter=adapter,
            name=target.name if target else out.name,
        )
        try:
            if not adapter:
                set_thinking_default(result.folder, thinking=thinks)
            if gguf:
                size = write_gguf(result.folder).stat().st_size
                result = result._replace(num_bytes=result.num_bytes + size)
            # The name of a folder may be no UTF-8.
            write_text(result.folder / CARD, card_text(facts), errors="replace")
        except UserError as error:  # it says what is missing: the weights are whole
            failure = error
        if out.exists():
            out.rmdir()
        result = result._replace(folder=result.folder.rename(out))
    if failure:
        raise failure
    if target is None:
        return result._asdict()
    upload(result.folder, target)
    return {**result._asdict(), "url": target.url, "private": target.is_private}


def policy_name(job: Job, name: str) -> str:
    names = sorted(set(job.policy_of.values()))
    name = name or (names[0] if len(names) == 1 else "")
    if name not in names:
        raise UserError(
            f"--policy is {name or None!r}: give one of the run's policies, {', '.join(names)}"
        )
    return name


def adapter_base(model: str, folder: Path, *, is_published: bool) -> tuple[str | None, str | None]:
    """Returns the name and the revision of an adapter's base, as PEFT reads them.

    A local folder has no name on other machines, which load an adapter that is published.
    """
    if local_model(model) is not None and not is_published:
        return str(folder), None
    name = base_model(model, folder).own_name
    return (name, model.partition("@")[2] or None) if name else (None, None)
