"""The schedule of a run without a run: who would wait for whom, at how many environments.

``workload`` says how long things take, ``clock`` and ``resources`` let simulated time pass, ``schedule`` plays the order of a run,
``outcome`` is what came of it, ``fit`` reads a workload off the metrics of a real run. Nothing here starts a model or a real clock.
"""
