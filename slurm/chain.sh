#!/bin/bash
# Three dependent jobs; each continues the training of the previous one.
#     bash slurm/chain.sh
# It submits slurm/train_digits.sbatch three times; afterok lets a job begin when the previous one has succeeded.
set -euo pipefail

options=(--checkpoint "checkpoints-chain-$$" --require-accuracy 0)
first=$(sbatch --parsable slurm/train_digits.sbatch "${options[@]}" --epochs 10)
second=$(sbatch --parsable --dependency="afterok:$first" slurm/train_digits.sbatch "${options[@]}" --epochs 20)
third=$(sbatch --parsable --dependency="afterok:$second" slurm/train_digits.sbatch "${options[@]}" --epochs 30)
echo "submitted $first, $second, $third; squeue --me shows them"
