"""NVML, the NVIDIA driver's monitoring library, in base units. Values that a device does not have are None."""
