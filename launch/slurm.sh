#!/usr/bin/env bash
# A Slurm job that trains on several nodes: sbatch runs it in this checkout, which all nodes share.
#
#   sbatch --nodes=2 --ntasks-per-node=8 --gpus-per-node=8 launch/slurm.sh \
#       train --config=configs/c3po.py --workdir=/mnt/runs/c3po
#
# One task per GPU. A job that crashes is queued again (up to RAGRL_RESTARTS times, 3 by default), and
# always one that is preempted, asked to stop or loses a node; it resumes from its newest checkpoint.
# A user error (exit code 2) ends it.
#SBATCH --job-name=ragrl
#SBATCH --output=ragrl-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
set -euo pipefail
# Slurm runs a copy of this file in another folder.
cd "${SLURM_SUBMIT_DIR:?this is a job: give it to sbatch}"

launch/install.sh # once, before the tasks start
code=0
# Tasks end by themselves when another one ends; the rest are killed 300 s later.
srun --kill-on-bad-exit=0 --wait=300 launch/ragrl.sh "$@" || code=$?
# SLURM_RESTART_COUNT counts preemptions and lost nodes too.
crashes=ragrl-$SLURM_JOB_ID.crashes
touch "$crashes"
((code == 0 || code == 2 || code == 143)) || echo "exit code $code" >>"$crashes"
if ((code != 0 && code != 2 && $(wc -l <"$crashes") <= ${RAGRL_RESTARTS:-3})); then
  echo "exit code $code: queued again" >&2
  scontrol requeue "$SLURM_JOB_ID"
else
  rm -f "$crashes"
fi
exit "$code"
