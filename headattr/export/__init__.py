"""A store as tables for other tools: Parquet, CSV, SQL; no torch."""
