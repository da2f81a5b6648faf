"""Grids of ranks, halos, and the redistribution of arrays."""
