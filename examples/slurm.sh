#!/bin/bash
# The loop of plain_loop.py as a job of Slurm, which puts it into the queue again until it is done.
#
# Slurm sends SIGUSR1 two minutes before the time is up, and SIGTERM to a job that has to make room.
# The program saves and ends with 75 then.
#SBATCH --time=04:00:00
#SBATCH --signal=USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append

srun python examples/plain_loop.py --directory "$HOME/checkpoints" "$@"
status=$?
if [ "$status" -eq 75 ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
