"""Ways to produce tokens, one file each."""
