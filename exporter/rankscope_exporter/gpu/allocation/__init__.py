"""GPU allocation: the holders of each GPU, from schedulers, processes and ranks, and how its time is used."""
