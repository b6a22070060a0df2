"""Scripts that set up, test and start the project. Those in Python use the standard library of Python 3.9 or newer only."""
