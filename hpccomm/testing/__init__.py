"""pytest for programs under mpiexec."""
