"""Data sets, stores of decoded images, splits, partitions and protocols."""
