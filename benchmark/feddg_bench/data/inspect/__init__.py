"""Looking at data sets: the doctor, contact sheets, split files."""
