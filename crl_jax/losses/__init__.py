"""Pure loss functions on arrays: one module per idea, no config objects, no state.

Values that will be averaged leave as ``records.Sum`` (total and count), so that micro-batches, shards and hosts add exactly.
"""
