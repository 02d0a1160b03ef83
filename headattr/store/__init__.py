"""What a run leaves behind: a folder of HDF5 shards; FORMAT.md is its definition."""
