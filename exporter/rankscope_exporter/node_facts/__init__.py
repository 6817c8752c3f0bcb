"""What an exporter sends about runs that it does not diagnose alone: the readings and steps of each second."""
