"""Weighted sums over the keys of a query, feature by feature, and what differs from them."""
