"""dcgm-exporter's names beside ours, for dashboards, alerts and autoscalers that ask for them (`--metrics.dcgm`)."""
