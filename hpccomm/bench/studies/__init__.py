"""Studies: measurements beyond timing one operation after the other."""
