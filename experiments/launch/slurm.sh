#!/bin/bash
# Trains a config on 2 hosts of 8 GPUs under Slurm, with one process for each host:
#     sbatch experiments/launch/slurm.sh gpt_20b_h100x16 [section.key=value ...]
#     TRAINER=train_images sbatch experiments/launch/slurm.sh resnet50_imagenet mesh.data=-1
# JAX finds the processes by Slurm's variables. All hosts must share the folder runs/. The same
# command resumes a run that was stopped, also with other numbers of nodes: --nodes=1.
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append

set -euo pipefail
config=$1
shift
# One process has all GPUs of its host. By default, JAX gives each process of Slurm one GPU.
export JAX_LOCAL_DEVICE_IDS=${JAX_LOCAL_DEVICE_IDS:-0,1,2,3,4,5,6,7}
# A plan may use 95 % of a GPU's memory; JAX takes 75 % by default.
export XLA_PYTHON_CLIENT_MEM_FRACTION=${XLA_PYTHON_CLIENT_MEM_FRACTION:-.95}
trainer=experiments.${TRAINER:-train}
srun --kill-on-bad-exit=1 python -m "$trainer" "$config" "$@" --out "runs/$config"
