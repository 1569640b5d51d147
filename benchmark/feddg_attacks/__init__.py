"""Privacy attacks: the messages of a run, and what an attacker learns from them."""
