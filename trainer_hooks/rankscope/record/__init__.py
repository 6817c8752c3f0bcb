"""The rank record, which the hook writes and the exporter reads: its layout, writer and reader."""
