"""What every rank has done: the flight recorder, its files, and what ``hpccomm trace`` makes of them."""
