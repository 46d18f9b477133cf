"""The demo: a real trace on a whole local cluster, requests moved while they stream, everything verified."""

from midstream.api.demo.run import run

__all__ = ["run"]
