"""The mismatch check (``HPCCOMM_DEBUG=DETAIL``): before each operation the ranks compare what they are about to do."""
