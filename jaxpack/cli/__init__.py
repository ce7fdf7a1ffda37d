"""The command line, `python -m jaxpack`."""

from jaxpack.cli.main import main

__all__ = ["main"]
