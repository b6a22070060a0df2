"""Compiling a recipe's programs for a TPU slice one does not have, and what the compiled programs say about memory and speed."""
