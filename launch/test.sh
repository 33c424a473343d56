#!/usr/bin/env bash
# Installs the package with its test tools into .venv (the first time) and runs the tests.
#
#   launch/test.sh [--all] [arguments of pytest]        --all runs the slow ones too
#
# The tests see eight virtual CPU devices, so that every mesh can be tried on one machine.
set -euo pipefail
# shellcheck source=launch/install.sh
source "$(dirname "${BASH_SOURCE[0]}")/install.sh"

selection=(-m "not slow")
args=()
for arg in "$@"; do
  if [[ "$arg" == --all ]]; then selection=(-m "slow or not slow"); else args+=("$arg"); fi
done

install_lock test

# Of two -m, pytest takes the last: a -m of the user's own wins.
exec "$venv/bin/python" -m pytest "${selection[@]}" ${args[@]+"${args[@]}"}
