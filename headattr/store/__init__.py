"""What a run leaves behind: a folder of HDF5 shards that any tool can read. FORMAT.md is its
definition."""
