"""Tensors in, tensors out; knows no models and no files."""
