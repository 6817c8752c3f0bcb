"""The diagnosis of runs that span nodes: `rankscope-exporter --analyze TARGETS` asks the exporters of their nodes."""
