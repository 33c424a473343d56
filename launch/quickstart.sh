#!/usr/bin/env bash
# Installs the package into the checkout's .venv (the first time) and runs `ragrl quickstart`, which
# writes to runs/ in the current folder.
#
#   launch/quickstart.sh [--real] [--device cpu|cuda|cuda12|tpu|auto] [arguments of ragrl quickstart]
#
# --real installs a pretrained language model and a pretrained encoder as well (180 MB), and trains that
# model on real questions.
set -euo pipefail
# All inputs of the quickstart are in this checkout or in pinned packages.
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1
for argument in "$@"; do
  [[ "$argument" != --real ]] || export RAGRL_MODELS=1
done
exec "$(dirname "${BASH_SOURCE[0]}")/ragrl.sh" quickstart "$@"
