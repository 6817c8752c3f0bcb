"""GPU monitoring: NVIDIA's driver, the threads that read it, GPU allocation, and the GPU metrics."""
