"""What several data sets share; no data set itself."""
