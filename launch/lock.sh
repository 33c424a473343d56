#!/usr/bin/env bash
# Regenerates requirements/*.lock from pyproject.toml and requirements/constraints.txt. Needs `uv`.
#
#   launch/lock.sh                        keeps the versions that still fit
#   launch/lock.sh --upgrade              takes the newest of everything
#   launch/lock.sh --upgrade-package jax  takes the newest of one
set -euo pipefail
CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")/.."

if ! command -v uv >/dev/null; then
  echo "error: uv is not on the PATH: run 'pip install uv'" >&2
  exit 1
fi

# One file serves every Python and every platform: --universal.
compile() {
  local name=$1
  shift
  echo "requirements/$name.lock"
  uv pip compile "$@" --output-file "requirements/$name.lock" \
    --universal --python-version 3.11 --generate-hashes --no-annotate --no-header --quiet
}

lock() {
  local name=$1
  shift
  compile "$name" pyproject.toml --group build --extra gguf --extra serve "$@" \
    --constraints requirements/constraints.txt
}

# The others contain the versions of cpu.lock: one environment can combine several.
lock cpu "$@"
lock cuda --extra cuda --constraints requirements/cpu.lock
lock cuda12 --extra cuda12 --constraints requirements/cpu.lock
lock tpu --extra tpu --constraints requirements/cpu.lock
lock test --extra test --extra docs --extra mcp --constraints requirements/cpu.lock
# These do without the package itself.
compile release --group release "$@"
compile references --group references --no-deps "$@"
compile integrations --group integrations "$@"
compile inspect --group inspect "$@"
