"""Code that several data sets share; none of it is a data set."""
