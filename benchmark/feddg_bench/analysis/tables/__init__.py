"""Tables: the one at the end of a command, and those made from records."""
