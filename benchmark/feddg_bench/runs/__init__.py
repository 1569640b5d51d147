"""Runs: from a request to a plan, through the loop, to a record."""
