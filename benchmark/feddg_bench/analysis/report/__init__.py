"""The report: one HTML file with a leaderboard, every run behind its numbers, and the figures."""
