# shellcheck shell=bash
# What all batch scripts begin with; adapt it to your site. Submit from the folder that has .venv, jobs/ and slurm/.

# The site's MPI, and the environment with hpccomm:
# module load openmpi
# shellcheck source=/dev/null
[[ -n ${VIRTUAL_ENV:-} ]] || source .venv/bin/activate

# The protocol that srun has to speak depends on the MPI library; `srun --mpi=list` shows what your srun knows.
case $(python -m mpi4py --mpi-lib-version) in
*"Open MPI"*) export MPI_TYPE=pmix ;;
*) export MPI_TYPE=pmi2 ;; # MPICH and its relatives; HPE Cray MPICH: cray_shasta
esac

# One thread of BLAS for each CPU that a task has; srun does not take this number from the job by itself.
export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1} SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}
