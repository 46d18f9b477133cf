"""All that touches CUDA and NCCL: streams, and communicators of two ranks. By reading: not run on a GPU yet.

NCCL's own functions, by ctypes. torch's process group for it has a watchdog that ends the whole process, engine and
all, when one peer hangs; vLLM's wrapper waits without a deadline for the other rank. Signatures are those of `nccl.h`.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from midstream.control.errors import BadInput
from midstream.migration.transfers.paired import SOURCE, TARGET

LIBRARY = "libnccl.so.2"
"""The one that torch has loaded already."""
ID_BYTES = 128
UINT8 = 1
SUCCESS, IN_PROGRESS = 0, 7
CONFIG_MAGIC = 0xCAFEBEEF
CONFIG_VERSION = 21400
"""The first layout of `ncclConfig_t`, which later libraries still take: they fill what they know more from defaults."""
POLL_S = 0.00005


class _Id(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * ID_BYTES),)


class _Config(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
    )


_MESSAGE = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "ncclGetVersion": (ctypes.POINTER(ctypes.c_int),),
    "ncclGetUniqueId": (ctypes.POINTER(_Id),),
    "ncclCommInitRankConfig": (
        ctypes.POINTER(ctypes.c_void_p), ctypes.c_int, _Id, ctypes.c_int, ctypes.POINTER(_Config),
    ),
    "ncclCommGetAsyncError": (ctypes.c_void_p, ctypes.POINTER(ctypes.c_int)),
    "ncclSend": _MESSAGE,
    "ncclRecv": _MESSAGE,
    "ncclCommAbort": (ctypes.c_void_p,),
}  # fmt: skip


def open_device(name: str | None) -> CudaDevice:
    """The device that KV lies in. Raises `BadInput` with the reason if nccl cannot serve it."""
    if name is None:
        raise BadInput("KV is in host memory")
    if not name.startswith("cuda") or not torch.cuda.is_available():
        raise BadInput("no CUDA")
    try:
        return CudaDevice(name, ctypes.CDLL(LIBRARY))
    except (OSError, AttributeError) as error:
        raise BadInput(f"no NCCL: {error}") from error


class CudaDevice:
    """`nccl.Device` of an NVIDIA GPU."""

    def __init__(self, name: str, library: ctypes.CDLL) -> None:
        self._device = torch.device(name)
        self._calls = {call: _function(library, call) for call in ARGUMENTS}
        number = ctypes.c_int()
        self._calls["ncclGetVersion"](ctypes.byref(number))
        self.version = str(number.value)

    def memory(self, size: int) -> torch.Tensor:
        """See `nccl.Device`."""
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def stream(self) -> CudaStream:
        """See `nccl.Device`."""
        return CudaStream(self._device)

    def new_id(self) -> bytes:
        """See `nccl.Device`."""
        made = _Id()
        _check(self._calls["ncclGetUniqueId"](ctypes.byref(made)))
        return bytes(bytearray(made))

    def communicator(self, unique_id: bytes, rank: int, deadline_s: float) -> NcclCommunicator:
        """See `nccl.Device`."""
        with torch.cuda.device(self._device):
            return NcclCommunicator(self._calls, unique_id, rank, deadline_s)


class CudaStream:
    """`nccl.DeviceStream`."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)

    def run(self, work: Callable[[], None]) -> None:
        """See `nccl.DeviceStream`."""
        with torch.cuda.stream(self.stream):
            work()

    def mark(self) -> CudaMark:
        """See `nccl.DeviceStream`."""
        return CudaMark(self.stream.record_event())


class CudaMark:
    """`nccl.Mark`."""

    def __init__(self, event: Any) -> None:
        self._event = event

    def is_reached(self) -> bool:
        """See `nccl.Mark`."""
        return bool(self._event.query())


class NcclCommunicator:
    """`nccl.Communicator`. It never blocks in NCCL, so that every wait has a deadline and can be ended by another."""

    def __init__(self, calls: dict[str, Any], unique_id: bytes, rank: int, deadline_s: float) -> None:
        """Meets the other rank. Raises `RuntimeError`."""
        self._calls, self._deadline_s = calls, deadline_s
        self._other = SOURCE if rank == TARGET else TARGET
        self._lock = threading.Lock()
        self._handle: ctypes.c_void_p | None = ctypes.c_void_p()
        config = _Config(ctypes.sizeof(_Config), CONFIG_MAGIC, CONFIG_VERSION, 0)
        arguments = ctypes.byref(self._handle), 2, _Id.from_buffer_copy(unique_id), rank, ctypes.byref(config)
        try:
            _check(calls["ncclCommInitRankConfig"](*arguments))
            self._until_done()
        except RuntimeError:
            self.abort()
            raise

    def send(self, memory: torch.Tensor, stream: CudaStream) -> None:
        """See `nccl.Communicator`."""
        self._message("ncclSend", memory, stream)

    def receive(self, memory: torch.Tensor, stream: CudaStream) -> None:
        """See `nccl.Communicator`."""
        self._message("ncclRecv", memory, stream)

    def _message(self, call: str, memory: torch.Tensor, stream: CudaStream) -> None:
        with torch.cuda.device(memory.device), self._lock:
            at, on = memory.data_ptr(), stream.stream.cuda_stream
            _check(self._calls[call](at, memory.numel(), UINT8, self._other, self._held(), on))
        self._until_done()  # before that, a mark on the stream would be ahead of the message

    def check(self) -> None:
        """See `nccl.Communicator`."""
        self._state()

    def abort(self) -> None:
        """See `nccl.Communicator`."""
        with self._lock:
            handle, self._handle = self._handle, None
            if handle is not None and handle.value is not None:
                self._calls["ncclCommAbort"](handle)

    def _until_done(self) -> None:
        until_s = time.monotonic() + self._deadline_s
        while self._state() == IN_PROGRESS:
            if time.monotonic() > until_s:
                raise RuntimeError(f"NCCL: no progress for {self._deadline_s} s")
            time.sleep(POLL_S)

    def _state(self) -> int:
        state = ctypes.c_int()
        with self._lock:
            _check(self._calls["ncclCommGetAsyncError"](self._held(), ctypes.byref(state)))
        _check(state.value)
        return state.value

    def _held(self) -> ctypes.c_void_p:
        if self._handle is None:
            raise RuntimeError("NCCL: aborted")
        return self._handle


def _function(library: ctypes.CDLL, name: str) -> Any:
    function = getattr(library, name)
    function.argtypes, function.restype = ARGUMENTS[name], ctypes.c_int
    return function


def _check(code: int) -> None:
    if code not in (SUCCESS, IN_PROGRESS):
        raise RuntimeError(f"NCCL: error {code}")
