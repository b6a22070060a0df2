"""The device mesh and the rules that place parameters, batches and caches on it."""
