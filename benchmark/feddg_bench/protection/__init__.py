"""Protection: sums that hide single updates, noise that bounds what they tell, and its epsilon."""
