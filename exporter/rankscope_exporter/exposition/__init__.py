"""Texts of metrics: what a metric is, the lines that are kept of it, and the pages that are put together of them."""
