#!/usr/bin/env bash
# Measures the speed figures of the project on this machine's device: one JSON file per measurement.
#
#   launch/figures.sh [FOLDER]      default: runs/figures; existing files are not measured again
#
# PYTHON names the interpreter (.venv's by default). Tunix is measured too if it is installed, and
# PyTorch with Transformers if it is installed for this machine's GPU.
set -euo pipefail
CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")/.."

out=${1:-runs/figures}
python=${PYTHON:-.venv/bin/python}
mkdir -p "$out"
# The largest measurement needs more than JAX's default of three quarters of 80 GB.
[[ -n "${XLA_CLIENT_MEM_FRACTION:-}" ]] || # JAX refuses both names
  export XLA_PYTHON_CLIENT_MEM_FRACTION=${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.92}

measure() {
  local file=$out/$1.json start=$SECONDS
  shift
  [[ -s "$file" ]] && return
  printf '%s: python %s\n' "$(basename "$file" .json)" "$*" >&2
  if "$python" "$@" >"$file.part" 2>"$file.log"; then
    mv "$file.part" "$file"
    printf '%s\n' "$(<"$file")" "  $((SECONDS - start)) s"
  else
    failed+=("$file.log")
    tail -n 5 "$file.log"
  fi
}

bench() { measure "$1" -m jax_ragrl bench "${@:2}" --json; }
lab() { measure "$1" "docs/lab/$2.py" "${@:3}"; }

failed=()
peer=(-m jax_ragrl bench train --json)
"$python" -c 'import tunix' 2>/dev/null && peer=(docs/lab/peers.py train tunix)

# A GRPO update: 32 prompts of 1,024 tokens, 8 actions of 128 tokens per prompt. In one batch, or in
# two. Tunix, with one action per row, needs five batches of as many tokens, or ten.
for tokens in 65536 32768; do
  measure "grpo-$tokens" "${peer[@]}" --shape qwen2.5-0.5b --prompts 32 --siblings 8 --prompt 1024 \
    --new 128 --tokens "$tokens"
done
on_gpu='import sys, torch; sys.exit(not torch.cuda.is_available())'
if "$python" -c "$on_gpu" 2>/dev/null; then
  lab grpo-transformers peers train transformers --shape qwen2.5-0.5b --prompts 32 --siblings 8 \
    --prompt 1024 --new 128 --tokens 32768
  lab sample-transformers peers sample transformers --shape qwen2.5-0.5b --new 256 --repeats 1
fi
bench grpo-xla train --shape qwen2.5-0.5b --prompts 32 --siblings 8 --prompt 1024 --new 128 \
  --attention xla
# Forward and backward pass of 32 x 1,024 tokens, all of them scored.
for size in 0.5b 1.5b; do
  for remat in full dots none; do
    bench "forward-$size-$remat" train --shape "qwen2.5-$size" --ungrouped --prompts 32 \
      --siblings 1 --prompt 1 --new 1023 --remat "$remat" --tokens 16384
  done
done
# Rollouts of 512 rows of unequal or of equal length.
for mean in 200 0; do
  bench "sample-$mean" sample --shape qwen2.5-0.5b --mean "$mean"
done
# The same without the kernel for decoded rows.
bench sample-0-xla sample --shape qwen2.5-0.5b --mean 0 --attention xla
# Conversations of six turns, without and with contexts that are kept.
for contexts in 0 64; do
  bench "chains-$contexts" sample --shape qwen2.5-0.5b --prompts 64 --siblings 1 --prompt 512 --new 128 \
    --turns 6 --observation 384 --kept-contexts "$contexts"
done
lab tape tape
# A complete step of C-3PO, rollout and updates, with a policy and a critic of 1.5B: all questions at
# once, and in two pipelined groups.
for cohorts in 1 2; do
  bench "step-1.5b-$cohorts" step --config=configs/tiny/c3po.py --shape qwen2.5-1.5b \
    --config.compute_dtype=bfloat16 --config.remat=full --config.run.questions_per_step=32 \
    --config.run.pipeline_groups="$cohorts" --config.packing.tokens_per_device=8192
done

# Rollouts during the update before, with a language model that sleeps for a second per call.
lab overlap overlap --config=configs/tiny/c3po.py --latency 1 --steps 6

# The ten nearest of two million vectors, for a batch of 256 queries.
for dtype in bfloat16 float32; do
  lab "search-$dtype" search --count 2000000 --dtype "$dtype"
done

((${#failed[@]} == 0)) || { printf 'failed, see %s\n' "${failed[@]}" >&2; exit 1; }
