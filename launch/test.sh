#!/usr/bin/env bash
# Installs the package with its test tools into .venv (the first time) and runs the tests.
#
#   launch/test.sh [--all] [arguments of pytest]        --all runs the slow ones too
#
# The tests see eight virtual CPU devices, so that every mesh can be tried on one machine. A process
# a core (eight at most) takes a file at a time, for compiling keeps one core busy; -n0 for one alone.
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
spread=(-n "$((processes < 8 ? processes : 8))" --dist loadfile)

# Of two -m, or two -n, pytest takes the last: the user's own wins.
exec "$venv/bin/python" -m pytest "${spread[@]}" "${selection[@]}" ${args[@]+"${args[@]}"}
