"""A node under siege: every attack of tests/attacks at once on a real exporter and a real job."""
