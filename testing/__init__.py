"""What tests, demo, benchmarks and gauntlet share."""
