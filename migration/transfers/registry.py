"""Transfer backends by name. A new one is a new file and a line here."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from midstream.control.errors import UnknownThing
from midstream.migration.transfers.base import Transfer, Where
from midstream.migration.transfers.budget import Budget
from midstream.migration.transfers.endpoint import Endpoint
from midstream.migration.transfers.shm_memory import Region

TRANSFERS = {
    "shm": "midstream.migration.transfers.shm:ShmTransfer",
    "nccl": "midstream.migration.transfers.nccl:NcclTransfer",
    "gloo": "midstream.migration.transfers.gloo:GlooTransfer",
    "rpc": "midstream.migration.transfers.rpc:RpcTransfer",
    "memory": "midstream.migration.transfers.memory:MemoryTransfer",
}
"""Where each backend lives; loaded only when asked for, because some need libraries that others do not."""


def make_transfer(name: str, *args: Any, **options: Any) -> Transfer:
    """A backend by name, made with its own arguments. Raises `UnknownThing` with the names there are."""
    place = TRANSFERS.get(name)
    if place is None:
        raise UnknownThing(f"no transfer is called {name!r}; there are: {', '.join(sorted(TRANSFERS))}")
    module, _, factory = place.partition(":")
    transfer: Transfer = getattr(import_module(module), factory)(*args, **options)
    return transfer


def make_transfers(names: Sequence[str], where: Where, regions: Sequence[Region] = ()) -> dict[str, Endpoint]:
    """Backends that connect processes, by name and in this order; `regions`: memory of ours that peers may map.

    Raises `UnknownThing`, and `BadInput` for one that cannot work here.
    """
    made: dict[str, Endpoint] = {}
    for name in names:
        transfer = make_transfer(name, where, regions)
        assert isinstance(transfer, Endpoint)
        made[name] = transfer
    budget = Budget(where.bytes_per_s)
    for endpoint in made.values():
        endpoint.budget = budget
    return made
