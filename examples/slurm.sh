#!/bin/bash
# Runs plain_loop.py as a job of Slurm. The job goes into the queue again until the loop is done.
#
# Slurm sends SIGUSR1 two minutes before the time is up, and SIGTERM to a job that has to make room.
# Then the program saves and exits with 75.
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
