"""What every room uses: errors, files, named random streams, processes, the terminal."""
