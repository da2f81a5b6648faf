"""GPU arrays: the private seam to CUDA, and what every transport of GPU arrays shares."""
