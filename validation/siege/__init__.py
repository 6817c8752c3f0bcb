"""A node under siege: every attack that tests/attacks holds off, made at once on a real exporter and a real job."""
