"""Records of runs: their format, storage and derived numbers."""
