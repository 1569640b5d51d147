"""Downloads from mirrors and hubs; files are checked before they get their final name."""
