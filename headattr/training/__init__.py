"""Train dictionaries of residual streams, and label their features."""
