"""The ledger: GPU time of each run by cause and its findings, as files by owner in the state directory."""
