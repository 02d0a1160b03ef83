"""Rows of a table by id, times a coefficient and rotated by position, laid out by slot."""
