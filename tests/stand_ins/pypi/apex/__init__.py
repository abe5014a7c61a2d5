"""Stand-in for PyPI's project apex, 0.9.10dev: not NVIDIA's, and not importable without the web framework it is for."""

import pyramid_mailer.interfaces  # noqa: F401
