"""Numbers of the shipped tables and claims, keyed by the runs that they come from."""
