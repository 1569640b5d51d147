"""Getting data sets: from mirrors and hubs, checked before they get their name."""
