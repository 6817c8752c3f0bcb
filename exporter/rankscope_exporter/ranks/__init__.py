"""Training ranks: their records in the run directories, the thread that reads them, and what is shown of them."""
