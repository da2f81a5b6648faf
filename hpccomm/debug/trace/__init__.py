"""The history of every rank: the flight recorder, its files, and ``hpccomm trace``, which reads them."""
