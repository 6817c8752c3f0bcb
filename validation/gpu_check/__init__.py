"""Checks the exporter and the hook on a real GPU; `__main__` says how."""
