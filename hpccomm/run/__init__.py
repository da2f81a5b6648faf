"""`hpccomm run program.py`: run programs that were not written for hpccomm under its watchdog."""
