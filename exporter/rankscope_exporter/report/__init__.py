"""What is known of this node now, for the API, the status page and `rankscope top`."""
