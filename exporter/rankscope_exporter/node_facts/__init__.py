"""Facts about runs that an exporter does not diagnose alone: the readings and steps of each second, to be sent."""
