"""What the options before the command say, for every command."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from midstream.api.cli.client import AdminClient
    from midstream.api.settings import Settings


@dataclass(frozen=True)
class Globals:
    """`midstream --data-dir … --url … --key … COMMAND`."""

    data_dir: Path | None = None
    url: str | None = None
    key: str | None = None

    def settings(self, **overrides: object) -> Settings:
        """Read the settings, with options on top. Raises `BadInput`."""
        from midstream.api.settings import load_settings

        return load_settings(data_dir=self.data_dir, admin_url=self.url, admin_key=self.key, **overrides)


def globals_of(context: typer.Context) -> Globals:
    """The options of a running command."""
    found = context.find_root().obj
    assert isinstance(found, Globals)
    return found


def admin_of(context: typer.Context) -> AdminClient:
    """A client of the admin API, closed with the command. Raises `BadInput` when none is known."""
    from midstream.api.cli.client import connect

    client = connect(globals_of(context).settings())
    context.call_on_close(client.close)
    return client
