"""Grids of ranks, halo exchange, and redistribution of arrays."""
