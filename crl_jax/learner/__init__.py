"""The learner: records in, one jitted and donated optimiser step, state out.

Owns: learner state, optimizer, objectives, batching, placement on a mesh and the step itself.
Does not: sample, read the bank, write checkpoints, or hold configuration objects.
"""
