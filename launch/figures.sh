#!/usr/bin/env bash
# Measures on this machine's device what the project says of its speed: one JSON file a measurement.
#
#   launch/figures.sh [FOLDER]      default: runs/figures; a file that is there is not measured again
#
# PYTHON names the interpreter (.venv's by default). Tunix, where it is installed, is measured beside.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

out=${1:-runs/figures}
python=${PYTHON:-.venv/bin/python}
mkdir -p "$out"
# The largest of these takes more than the three quarters of 80 GB that JAX would stop at.
export XLA_PYTHON_CLIENT_MEM_FRACTION=${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.92}

measure() {
  local file=$out/$1.json start=$SECONDS
  shift
  [[ -s "$file" ]] && return
  printf '%s: ragrl bench %s\n' "$(basename "$file" .json)" "$*" >&2
  if "$python" -m jax_ragrl.cli.main bench "$@" --json >"$file.part" 2>"$file.log"; then
    mv "$file.part" "$file"
    printf '%s\n' "$(<"$file")" "  $((SECONDS - start)) s"
  else
    failed+=("$file.log")
    tail -n 5 "$file.log"
  fi
}

failed=()
against=()
"$python" -c 'import tunix' 2>/dev/null && against=(--against tunix)

# A GRPO update: 32 prompts of 1,024 tokens, 8 actions of 128 after each. All of it in one batch, or in
# two; Tunix, which has an action in each row, takes five batches of as many tokens, or ten.
for tokens in 65536 32768; do
  measure "grpo-$tokens" train --shape qwen2.5-0.5b --prompts 32 --siblings 8 --prompt 1024 --new 128 \
    --tokens "$tokens" ${against[@]+"${against[@]}"}
done
measure grpo-xla train --shape qwen2.5-0.5b --prompts 32 --siblings 8 --prompt 1024 --new 128 \
  --attention xla
# Forward and backward of 32 x 1,024 tokens, every one scored.
for size in 0.5b 1.5b; do
  for remat in full dots none; do
    measure "forward-$size-$remat" train --shape "qwen2.5-$size" --ungrouped --prompts 32 \
      --siblings 1 --prompt 1 --new 1023 --remat "$remat" --tokens 16384
  done
done
# Rollouts of 512 rows: caches that grow and batches that shrink, or one program for all tokens; rows
# of unequal length, or of equal.
for mean in 200 0; do
  for slots in 128 1024; do
    measure "sample-$mean-$slots" sample --shape qwen2.5-0.5b --mean "$mean" --slots "$slots"
  done
done
# A whole step of C-3PO, rollout and updates, with a policy and a critic of 1.5B: all questions in
# step, and in two parts that take turns.
for cohorts in 1 2; do
  measure "step-1.5b-$cohorts" step --config=configs/tiny/c3po.py --shape qwen2.5-1.5b \
    --config.compute=bfloat16 --config.remat=full --config.run.questions=32 \
    --config.run.cohorts="$cohorts" --config.layout.tokens=8192
done

# The ten nearest of two million vectors, for 256 queries at once.
for dtype in bfloat16 float32; do
  measure "search-$dtype" search --count 2000000 --dtype "$dtype"
done

((${#failed[@]} == 0)) || { printf 'failed, see %s\n' "${failed[@]}" >&2; exit 1; }
