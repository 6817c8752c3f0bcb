"""NVML, the NVIDIA driver's monitoring interface, in base units and with None for what a device does not have."""
