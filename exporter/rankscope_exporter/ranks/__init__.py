"""Training ranks: their records in the run directories, the thread that reads them, and their metrics."""
