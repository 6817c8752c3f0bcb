"""The exporter's pages."""
