#!/usr/bin/env bash
# Installs the package for this machine's device into the checkout's .venv (the first time) and runs
# `ragrl` in the current folder, to which relative paths refer.
#
#   launch/ragrl.sh [--device cpu|cuda|cuda12|tpu|auto] COMMAND [arguments of ragrl COMMAND]
set -euo pipefail
here=$PWD # install.sh changes to the checkout
# shellcheck source=launch/install.sh
source "$(dirname "${BASH_SOURCE[0]}")/install.sh"

wanted=""
args=()
while (($#)); do
  case "$1" in
    --device=*) wanted=${1#*=} ;;
    --device)
      (($# > 1)) || fail '--device needs a value' 'use --device cpu, cuda, cuda12, tpu or auto'
      wanted=$2
      shift
      ;;
    *) args+=("$1") ;;
  esac
  shift
done

device=$(resolve_device "$wanted")
install_lock "$device"
[[ -z "${RAGRL_MODELS:-}" ]] || install_models

# An environment may contain the packages of several devices; the CPU is always available too.
if [[ "$device" == cpu ]]; then platforms=cpu; else platforms=${device%12},cpu; fi
export JAX_PLATFORMS=${JAX_PLATFORMS:-$platforms}
say "running on $device: ragrl ${args[*]-}"
cd "$here"
exec "$venv/bin/ragrl" ${args[@]+"${args[@]}"}
