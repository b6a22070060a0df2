"""The rules of the conformance suite and the process that applies them; ``envs.check`` is its front."""
