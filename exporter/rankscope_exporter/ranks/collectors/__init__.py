"""The rank collectors, one file each: file = collector = `--collector.<name>` = value of the label `collector`."""
