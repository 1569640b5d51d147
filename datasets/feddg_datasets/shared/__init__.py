"""Code shared by several data sets; none of it is a data set."""
