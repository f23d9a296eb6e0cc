"""Data sets, the training loop and the rows it records: everything that touches a clock, a file or a seed."""
