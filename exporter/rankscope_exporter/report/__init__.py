"""Reports on this node's runs and GPUs for the API, the status page and `rankscope top`."""
