"""The transport of GPU arrays: NCCL, by CuPy."""
