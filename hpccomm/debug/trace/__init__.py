"""The history of every rank: flight recorder, files, and ``hpccomm trace``, which reads them."""
