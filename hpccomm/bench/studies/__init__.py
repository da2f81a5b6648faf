"""Studies: measurements that do more than time single operations."""
