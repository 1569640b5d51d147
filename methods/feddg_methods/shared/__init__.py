"""Named pieces that several methods share: mathematics without state."""
