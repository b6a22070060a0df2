"""Names of the files in a run's folder that more than one part looks for.

Owns: the names. Does not: know what the files hold, or import anything.
"""

CONFIG = "config.yaml"
BANK_FILE = "bank.sqlite"
