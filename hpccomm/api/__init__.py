"""The functions that users call, documented and typed."""
