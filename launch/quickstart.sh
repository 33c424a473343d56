#!/usr/bin/env bash
# Installs the package into .venv (the first time) and runs `ragrl quickstart`.
#
#   launch/quickstart.sh [--device cpu|cuda|tpu|auto] [arguments of ragrl quickstart]
set -euo pipefail
# shellcheck source=launch/install.sh
source "$(dirname "${BASH_SOURCE[0]}")/install.sh"

wanted=""
args=()
while (($#)); do
  case "$1" in
    --device=*) wanted=${1#*=} ;;
    --device)
      (($# > 1)) || fail '--device needs a value' 'use --device cpu, cuda, tpu or auto'
      wanted=$2
      shift
      ;;
    *) args+=("$1") ;;
  esac
  shift
done

device=$(resolve_device "$wanted")
install_lock "$device"

# An environment may hold more than one device's packages; the CPU stays in reach beside the device.
if [[ "$device" == cpu ]]; then platforms=cpu; else platforms=$device,cpu; fi
export JAX_PLATFORMS=${JAX_PLATFORMS:-$platforms}
# Everything that the quickstart reads is in this checkout.
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1
say "running on $device: ragrl quickstart ${args[*]-}"
exec "$venv/bin/ragrl" quickstart ${args[@]+"${args[@]}"}
