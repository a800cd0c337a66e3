"""KV stores, one file each."""
