"""What people do with an experience bank: ``crl bank ls | show | why | stats | search | export | import | seed | verify | ...``.

``place`` finds the file a command means and opens it, ``book`` reads it at one revision, ``lineage`` and ``statistics`` say what it means,
``view`` searches it as the actor does. ``listing``, ``telling`` and ``upkeep`` print; ``exchange``, ``seeding`` and ``consolidate`` write.
``commands`` holds the arguments. Importing the package imports nothing heavy.
"""
