"""Measurements that anyone can repeat, as `mpic-rag bench`."""
