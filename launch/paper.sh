#!/usr/bin/env bash
# Goes from raw downloads to a row of a paper's main table, by the commands of docs/papers/PAPER.md.
#
#   launch/paper.sh PAPER [--toy] [STAGE ...]      c3po mmoa_rag coda mao_arag opera search_r1
#
# Without a stage all of them run, in order, except `plan`; the same line resumes. A stage that asks a
# model of the stage `server` is named after it: server evaluate. With --toy every
# command runs with stand-ins on a CPU, in minutes: a generated corpus, the tiny policy, BM25, and a
# server of fixed replies. Results go to runs/, or to the folder that RUNS names.
set -euo pipefail
CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")/.."
command -v ragrl >/dev/null || PATH=${RAGRL_VENV:-.venv}/bin:$PATH
command -v ragrl >/dev/null || { echo "error: ragrl is not installed: run launch/install.sh" >&2; exit 1; }
# As launch/figures.sh: policies of 7B and an index need more than JAX's default, three quarters of a GPU.
[[ -n "${XLA_CLIENT_MEM_FRACTION:-}" ]] || # JAX refuses both names
  export XLA_PYTHON_CLIENT_MEM_FRACTION=${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.92}
script=$(python docs/_ext/papers.py "$@")
exec bash -c "$script"
