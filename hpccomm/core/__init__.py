"""The basis of hpccomm's functions, without MPI and without CUDA."""
