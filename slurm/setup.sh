# shellcheck shell=bash
# What all batch scripts begin with; adapt it to your site. Submit from the folder that has .venv, jobs/ and slurm/.

# The site's MPI, and the environment with hpccomm:
# module load openmpi
if [[ -z ${VIRTUAL_ENV:-} && (-z ${CONDA_PREFIX:-} || -e .venv) ]]; then
    # The folder may be one that others write to: what they have put there is not run.
    if [[ ! -O .venv/bin/activate ]]; then
        echo "$PWD/.venv/bin/activate is missing, or not yours: activate your environment before sbatch" >&2
        exit 1
    fi
    # shellcheck source=/dev/null
    source .venv/bin/activate
fi

# The protocol that srun has to speak depends on the MPI library; `srun --mpi=list` shows what your srun knows.
library=$(python -m mpi4py --mpi-lib-version | tr -d '\0')
case $library in
*"Open MPI"*) type=pmix ;;
*"CRAY MPICH"*) type=cray_shasta ;;
*) type=pmi2 ;; # MPICH, Intel MPI, MVAPICH
esac
export MPI_TYPE=${MPI_TYPE:-$type}

# The MPICH of PyPI: with UCX each rank publishes an address of 4 KB, which Slurm's pmi2 sometimes misreads, and the job
# hangs at its start ("value not properly terminated in client request"); with libfabric it is 64 bytes.
case $library in
*"ch4:ucx ofi"*) export MPIR_CVAR_CH4_NETMOD=${MPIR_CVAR_CH4_NETMOD:-ofi} ;;
esac

# One thread of BLAS for each CPU that a task has; srun does not take this number from the job by itself. Before mpirun,
# unset SRUN_CPUS_PER_TASK: it would limit the daemons that Open MPI starts by srun to the CPUs of one task.
export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1} SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}
