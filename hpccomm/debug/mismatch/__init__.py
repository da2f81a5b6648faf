"""The mismatch check (``HPCCOMM_DEBUG=DETAIL``): ranks compare each operation before it begins."""
