"""The job as MPI sees it, beside the arrays: the library, who is in a group, which tags are ours, ranks that die."""
