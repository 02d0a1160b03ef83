"""The score and the output of a head as tables of feature products (design: sections 4 and 5)."""
