"""Training scripts to try Rankscope on, and the demo."""
