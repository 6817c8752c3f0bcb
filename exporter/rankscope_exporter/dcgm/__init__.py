"""dcgm-exporter's metric names in addition to ours, for dashboards, alerts and autoscalers (`--metrics.dcgm`)."""
