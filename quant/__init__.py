"""Storage formats for weights and KV caches."""
