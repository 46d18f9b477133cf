"""What vLLM mixes into its worker class (`worker_extension_cls`), called on every rank by `collective_rpc`."""

from __future__ import annotations

import msgspec

from midstream.instance.engines.vllm import calls
from midstream.instance.engines.vllm.copier import start_copier
from midstream.instance.engines.vllm.kv_memory import kv_memory
from midstream.instance.engines.vllm.seams import worker as seam
from midstream.instance.engines.vllm.shared_kv import share


class WorkerExtension:
    """Small calls between steps; bytes are the copier's business, in a thread of its own."""

    def mig_block_bytes(self, _: bytes) -> int:
        """Bytes of one block on this rank."""
        seam.check_worker(self)
        return kv_memory(*seam.kv_tensors(self)).block_bytes

    def mig_layout(self, _: bytes) -> str:
        """What must be equal on workers that exchange KV."""
        return seam.layout_of(self)

    def mig_attach(self, argument: bytes) -> bool:
        """Start the copier and let it connect to the llumlet."""
        attach = msgspec.msgpack.decode(argument, type=calls.Attach)
        regions = share(seam.kv_holders(self)) if attach.is_shared else []
        start_copier(attach.socket, seam.rank_of(self), kv_memory(*seam.kv_tensors(self)), regions)
        return True

    def mig_insert(self, argument: bytes) -> None:
        """Know a run that did not begin here."""
        seam.insert_request(self, msgspec.msgpack.decode(argument, type=calls.Insert))

    def mig_rng(self, slot: bytes) -> bytes:
        """State of a run's random generator."""
        return seam.generator_state(self, slot.decode())
