"""The rank record: its layout, and both of its ends. The contract between the hook and the exporter."""
