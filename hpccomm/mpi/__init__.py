"""The host backend: NumPy arrays over mpi4py."""
