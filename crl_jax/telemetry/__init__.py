"""Telemetry: what a run tells the outside, never what it decides by.

Owns: metric trackers, the phase clock, the progress line, the profiler window, the final report and the result object.
Promises: importing it starts no JAX; any combination of trackers works; the JSONL log survives a kill.
Does not: compute means of means. Callers hand in ``records.Sum`` values or finished numbers.
"""
