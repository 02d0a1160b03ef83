"""Stores and answers as pictures and files for other tools; one file a viewer."""
