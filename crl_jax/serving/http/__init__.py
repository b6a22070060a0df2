"""An OpenAI-compatible HTTP front door for a sampler: completions, sessions, weights, counters.

``request`` and ``response`` say what goes over the wire, ``text`` makes text of ids, ``answers`` and ``sessions`` remember between
requests, ``completions`` asks the sampler, ``app`` has the routes and ``server`` the socket. Needs aiohttp (``pip install -e '.[serve]'``),
which is imported by ``app``, ``completions`` and ``server`` only.
"""
