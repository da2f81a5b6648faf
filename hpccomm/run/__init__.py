"""`hpccomm run program.py`: programs that were not written for hpccomm, under its watchdog."""
