export PYTHONPATH=/work/h/cluster OPENBLAS_NUM_THREADS=1
P=/work/main/.venv/bin/python
for i in $(seq 1 $2); do timeout 15 srun -N2 -n$1 --mpi=pmi2 $P -c "from mpi4py import MPI; MPI.COMM_WORLD.Barrier()" >/tmp/xx.log 2>&1; echo -n "$? "; grep -h pmi2: /tmp/xx.log | head -2 | cut -c1-150; done; echo
