"""Settings: their schema, layers, recipes and the run key."""
