"""The job as MPI sees it, without the arrays: the MPI library, members of a group, hpccomm's tags, dead ranks."""
