"""Write the golden folders beside this file: `python tests/models/golden/make_golden.py`.

Needs torch. Each folder holds a tiny checkpoint, bfloat16 to be small, and `reference.npz` with
what Transformers computes from it in float32: the comparison is alive where torch is not.
"""

import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import hf_reference  # noqa: E402

KEPT = ("config.json", "model.safetensors")


def main() -> None:
    for name in hf_reference.CASES:
        folder = HERE / name
        folder.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory() as temporary:
            answers = _write(name, temporary)
            for file in KEPT:
                shutil.copyfile(Path(temporary) / file, folder / file)
        np.savez_compressed(folder / "reference.npz", **answers)
        print(name, sum(f.stat().st_size for f in folder.iterdir()))


def _write(name: str, folder: str) -> dict[str, np.ndarray]:
    import torch
    from transformers import AutoModelForCausalLM

    hf_reference.save(hf_reference.make_model(name).to(torch.bfloat16), folder)
    # Loaded again, because casting a model to bfloat16 and back also rounds its rotary frequencies.
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", trust_remote_code=False
    )
    ids_BL, mask_BL = hf_reference.padded_batch(hf_reference.LENGTH)
    grads = hf_reference.gradients(model, ids_BL, mask_BL)
    return {
        "ids": ids_BL,
        "mask": mask_BL,
        "logits": hf_reference.logits(model, ids_BL, mask_BL),
        # Rows padded on the right cannot be continued.
        "greedy": hf_reference.greedy(model, ids_BL[:2], mask_BL[:2], hf_reference.NEW_TOKENS),
        "gradient_names": np.array(list(grads)),
        "gradient_norms": np.array([np.linalg.norm(g) for g in grads.values()]),
    }


if __name__ == "__main__":
    main()
