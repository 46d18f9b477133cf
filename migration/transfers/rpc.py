"""The `rpc` transfer: TCP straight from block memory into block memory, between any two hosts."""

from __future__ import annotations

from collections.abc import Callable

from midstream.migration.transfers.base import Channel
from midstream.migration.transfers.endpoint import TcpEndpoint
from midstream.migration.transfers.rpc_channel import RpcChannel
from midstream.migration.transfers.rpc_receiver import Reservation, receive
from midstream.migration.transfers.rpc_socket import Stream


class RpcTransfer(TcpEndpoint):
    """One process's rpc endpoint. The handle is also in every frame."""

    name = "rpc"

    async def _channel(self, stream: Stream, handle: bytes, left: Callable[[Channel], None]) -> Channel:
        return RpcChannel(stream, handle, self.budget, left)

    async def _receive(self, stream: Stream, handle: bytes, reservation: Reservation) -> None:
        await receive(stream, handle, reservation)
