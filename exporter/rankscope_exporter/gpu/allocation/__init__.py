"""Who holds each GPU and what becomes of its time: facts from schedulers, processes and ranks, and what they mean."""
