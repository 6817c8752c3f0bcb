"""GPUs: NVIDIA's driver, the threads that read it, who holds each GPU, and what is shown of them."""
