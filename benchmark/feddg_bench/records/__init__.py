"""Records of runs: their form, their store, and what is read out of them."""
