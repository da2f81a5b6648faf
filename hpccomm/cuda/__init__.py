"""GPU arrays: the private seam to CUDA, and code shared by all transports of GPU arrays."""
