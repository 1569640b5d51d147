"""Protection: sums that hide single updates, noise that bounds what leaks, and its epsilon."""
