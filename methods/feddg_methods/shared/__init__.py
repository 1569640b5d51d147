"""Building blocks shared by several methods: mathematics without state."""
