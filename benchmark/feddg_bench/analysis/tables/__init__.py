"""Tables: the summary at the end of a command, and tables made from records."""
