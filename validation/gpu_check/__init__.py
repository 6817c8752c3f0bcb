"""Check the exporter and the hook on a real GPU; see `__main__`."""
