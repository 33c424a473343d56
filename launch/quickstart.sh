#!/usr/bin/env bash
# Installs the package into .venv (the first time) and runs `ragrl quickstart`.
#
#   launch/quickstart.sh [--device cpu|cuda|cuda12|tpu|auto] [arguments of ragrl quickstart]
set -euo pipefail
# All inputs of the quickstart are in this checkout.
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1
exec "$(dirname "${BASH_SOURCE[0]}")/ragrl.sh" quickstart "$@"
