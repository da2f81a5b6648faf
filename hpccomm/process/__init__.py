"""What is around the program: its launcher, its MPI library, its end."""
