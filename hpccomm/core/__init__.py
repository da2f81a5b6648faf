"""What the functions stand on, without MPI and without CUDA."""
