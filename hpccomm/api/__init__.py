"""What users call: each function documented and typed."""
