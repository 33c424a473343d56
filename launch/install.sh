#!/usr/bin/env bash
# Makes .venv and installs one lock file into it; does nothing where that lock is already installed.
#
#   launch/install.sh [cpu|cuda|tpu|test|auto]      auto (the default) looks for an accelerator
#
# PYTHON names the interpreter to use, RAGRL_VENV another folder than .venv, RAGRL_DEVICE what
# `auto` means. quickstart.sh and test.sh source this file for its functions.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=${RAGRL_VENV:-.venv}
[[ "$venv" == /* ]] || venv=$PWD/$venv
# jax[cuda13] runs on this driver and newer ones.
oldest_driver=580

# On a CPU each step of XLA takes its memory afresh from the C library: in huge pages that saves most
# of the system time, a quarter of the whole.
export GLIBC_TUNABLES=${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1}

say() { printf '%s\n' "$*" >&2; }
fail() {
  say "error: $1"
  shift
  for line in "$@"; do say "  $line"; done
  exit 1
}

# --- which device --------------------------------------------------------------------------------

driver_version() {
  { nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null || true; } | head -n 1
}

has_tpu() {
  # A TPU's chips are /dev/accel0, ...; other makers' lie one folder down, in /dev/accel/.
  compgen -G '/dev/accel[0-9]*' >/dev/null && return 0
  # Newer TPUs are vfio groups, as are other devices: ask for Google's PCI vendor number as well.
  compgen -G '/dev/vfio/[0-9]*' >/dev/null &&
    grep -qsx 0x1ae0 /sys/bus/pci/devices/*/vendor && return 0
  [[ -n "${TPU_ACCELERATOR_TYPE:-}${TPU_WORKER_HOSTNAMES:-}" ]]
}

detect_device() {
  local driver
  driver=$(driver_version)
  if [[ "$driver" =~ ^([0-9]+)\. ]]; then
    if ((BASH_REMATCH[1] >= oldest_driver)); then
      echo cuda
      return
    fi
    say "using the CPU: NVIDIA driver $driver found, but CUDA 13 needs $oldest_driver or newer"
  fi
  if has_tpu; then echo tpu; else echo cpu; fi
}

# cpu, cuda or tpu, from what the user asked for.
resolve_device() {
  local wanted=${1:-${RAGRL_DEVICE:-auto}} driver
  case "$wanted" in
    cpu | tpu) echo "$wanted" ;;
    auto) detect_device ;;
    cuda)
      driver=$(driver_version)
      if [[ "$driver" =~ ^([0-9]+)\. ]] && ((BASH_REMATCH[1] < oldest_driver)); then
        fail "NVIDIA driver $driver is too old: CUDA 13 needs $oldest_driver or newer" \
          "update the driver, or use --device cpu"
      fi
      echo cuda
      ;;
    *) fail "unknown device '$wanted'" "use --device cpu, cuda, tpu or auto" ;;
  esac
}

# --- the virtual environment ---------------------------------------------------------------------

find_python() {
  local candidate found=""
  # ScaNN, and so the locks, go from 3.11 to 3.13.
  local in_range='import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))'
  for candidate in "${PYTHON:-python3}" python3.12 python3.11 python3.13; do
    if "$candidate" -c "$in_range" 2>/dev/null; then
      echo "$candidate"
      return
    fi
    found+=" $candidate ($("$candidate" --version 2>/dev/null || echo 'does not run'))"
    # A name that the user gave is used or refused, never replaced.
    [[ -z "${PYTHON:-}" ]] || break
  done
  fail "Python 3.11, 3.12 or 3.13 is needed; tried$found" \
    "install one, or name it: PYTHON=/path/to/python3.12 $0"
}

make_venv() {
  local python
  "$venv/bin/python" -c '' 2>/dev/null && return
  if [[ -e "$venv" && ! -e "$venv/pyvenv.cfg" ]]; then
    fail "$venv exists and is no virtual environment" \
      "remove it, or set RAGRL_VENV to another folder"
  fi
  python=$(find_python) || exit 1
  "$python" -c 'import ensurepip, venv' 2>/dev/null ||
    fail "$python lacks the venv module" \
      "install it (Debian and Ubuntu: apt install python3-venv), or set PYTHON to another Python"
  say "making $venv with $("$python" --version)"
  "$python" -m venv --clear "$venv" ||
    fail "could not make $venv" "is there space, and may you write to $(dirname "$venv")?"
}

# --- the packages --------------------------------------------------------------------------------

# Changes with any lock, with pyproject.toml, and when the checkout moves (its path is in the venv).
fingerprint() {
  { cat requirements/*.lock pyproject.toml && pwd; } | { sha256sum 2>/dev/null || shasum -a 256; }
}

# Counts on a terminal what pip collects; its own lines go to the log.
show_progress() {
  [[ -t 2 ]] || { cat >/dev/null; return; }
  awk '/^Collecting /{printf "\r  %d packages", ++n; fflush()}
       /^Installing collected/{printf ", unpacking ..."; fflush()} END{if (n) print ""}' >&2
}

explain_failure() {
  local log=$1 what=$2 cause
  if grep -qiE 'no space left|disk quota' "$log"; then
    fail "$what: the disk is full" "free some space, or set RAGRL_VENV (and TMPDIR) to another disk"
  elif grep -q 'DO NOT MATCH THE HASHES' "$log"; then
    fail "$what: a download is not the file that the lock names" \
      "run '$venv/bin/python -m pip cache purge' and try again"
  elif grep -qE 'NewConnection|NameResolution|ConnectTimeout|ReadTimeout|ProxyError' "$log"; then
    fail "$what: the package registry cannot be reached" \
      "check the network, the proxy and pip's configuration"
  elif grep -q 'No matching distribution' "$log"; then
    cause=$(grep -m 1 'No matching distribution' "$log")
    fail "$what: ${cause#ERROR: }" \
      "is the package registry within reach? (the network, a proxy, pip's configuration)" \
      "is this platform? the locks are for Linux and macOS with Python 3.11 to 3.13;" \
      "here is $(uname -sm) with $("$venv/bin/python" --version)"
  fi
  { grep -E 'Error|ERROR|error:' "$log" || cat "$log"; } | tail -n 5 >&2
  fail "$what: pip failed" \
    "see the lines above, and $log for the rest; then run the same command again"
}

pip_install() {
  local what=$1 log=$venv/install.log
  shift
  "$venv/bin/python" -m pip install --disable-pip-version-check --no-input --progress-bar off "$@" \
    2>&1 | tee "$log" | show_progress || explain_failure "$log" "$what"
}

# Installs requirements/$1.lock and this checkout, editable, into the virtual environment.
install_lock() {
  local which=$1 now stamp=$venv/.ragrl-$1
  [[ -f "requirements/$which.lock" ]] || fail "there is no requirements/$which.lock"
  now=$(fingerprint)
  make_venv
  [[ "$(cat "$stamp" 2>/dev/null)" != "$now" ]] || return 0
  say "installing requirements/$which.lock into $venv (once; some minutes)"
  pip_install "could not install requirements/$which.lock" \
    --require-hashes -r "requirements/$which.lock"
  say "installing jax_ragrl from $PWD"
  pip_install "could not install jax_ragrl" --no-deps --no-build-isolation -e .
  echo "$now" >"$stamp"
}

if [[ "${BASH_SOURCE[0]}" == "$0" ]]; then
  which=${1:-auto}
  [[ "$which" == test ]] || which=$(resolve_device "${1:-}")
  install_lock "$which"
  say "ready: source $venv/bin/activate"
fi
