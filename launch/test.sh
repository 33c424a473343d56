#!/usr/bin/env bash
# Installs the package with its test tools into .venv (the first time) and runs the tests.
#
#   launch/test.sh [--all] [arguments of pytest]        --all runs the slow ones too
#
# The tests see eight virtual CPU devices, so that every mesh can be tested on one machine. One
# process per core (at most eight) takes one file at a time, because compiling keeps one core busy,
# in the order of `conftest.py`; -n0 uses a single process.
set -euo pipefail
# shellcheck source=launch/install.sh
source "$(dirname "${BASH_SOURCE[0]}")/install.sh"

selection=(-m "not slow")
args=()
for arg in "$@"; do
  if [[ "$arg" == --all ]]; then selection=(-m "slow or not slow"); else args+=("$arg"); fi
done

install_lock test

processes=$(getconf _NPROCESSORS_ONLN)
spread=(-n "$((processes < 8 ? processes : 8))" --dist loadfile --no-loadscope-reorder)

# pytest uses the last of several -m or -n options: the one of the user takes precedence.
exec "$venv/bin/python" -m pytest "${spread[@]}" "${selection[@]}" ${args[@]+"${args[@]}"}
