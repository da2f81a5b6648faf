"""Studies: what takes more than timing one operation after the other."""
