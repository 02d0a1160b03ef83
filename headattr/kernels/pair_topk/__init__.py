"""The k strongest products of two lists of vectors, for many edges."""
