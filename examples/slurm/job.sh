#!/bin/bash
# One script over the nodes of a job, without a server: sbatch job.sh
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=2
#SBATCH --signal=TERM@60
#SBATCH --requeue
#SBATCH --open-mode=append

head=$(scontrol show node "$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)" --oneliner |
  sed 's/.*NodeAddr=\([^ ]*\).*/\1/')
export head
srun bash -c 'exec zerolab launch --no_ssh --num_nodes "$SLURM_NNODES" --node_rank "$SLURM_NODEID" \
  --master_addr "$head" --num_gpus 2 --cpu ../hostfile/train.py --steps 1000'
code=$?
# 75: the ranks saved a checkpoint and left; 143: they were stopped, and resume from the last one.
if [ "$code" = 75 ] || [ "$code" = 143 ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
