"""The transport of GPU arrays over NCCL."""
