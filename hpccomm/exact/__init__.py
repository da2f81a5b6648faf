"""Sums that have the same bits on any number of ranks."""
