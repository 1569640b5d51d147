"""Shared by all packages: errors, files, named random streams, processes, the terminal."""
