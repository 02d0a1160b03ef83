"""One file a dictionary format: path -> dictionary."""
