"""The residual stream as sums of components: one file a kind of basis, one a file format."""
