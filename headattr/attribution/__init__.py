"""The score and the output of a head as tables of feature products."""
