# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = ["jax_ragrl[cuda] @ git+https://github.com/jax-ragrl/jax_ragrl"]
# ///
"""Trains as a job of Hugging Face, on one machine; started again, the job resumes its run.

    hf jobs uv run --flavor a100-large --timeout 24h --volume hf://buckets/OWNER/runs:/runs \
        --env CONFIG=configs/c3po.py --env RUN=c3po launch/hf_job.py [ARGUMENT OF ragrl train ...]

The bucket has to exist. A variable names the config, because the client uploads arguments that are
files and refuses others that end in `.py`. Private models need `--secrets HF_TOKEN`.
"""

import os
import sys

from jax_ragrl.cli.main import main

if __name__ == "__main__":
    if missing := [name for name in ("CONFIG", "RUN") if not os.environ.get(name)]:
        sys.exit(f"error: {missing[0]} is not set: add --env {missing[0]}=VALUE before the script")
    options = [f"--config={os.environ['CONFIG']}", f"--workdir=/runs/{os.environ['RUN']}"]
    sys.exit(main(["train", *options, *sys.argv[1:]]))
