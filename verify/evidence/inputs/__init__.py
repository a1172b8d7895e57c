"""Make calls of an operator: which record, which values, whole and in shards."""
