"""``crl bank ui``: a web page on a bank, for looking only.

``library`` keeps the file open and its past at hand, ``panels`` says what each part of the page shows, ``app`` has the routes and who may
use them, ``main`` the socket. ``static`` is the page: HTML, CSS and JavaScript of our own, no build step, nothing from elsewhere. Needs
aiohttp (``pip install -e '.[serve]'``), which is imported by ``app`` only.
"""
