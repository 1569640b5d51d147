"""Numbers of the shipped tables and claims, by the runs that they come from."""
