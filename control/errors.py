"""The errors of Midstream.

MidstreamError
├── BadInput            the caller said something wrong; never retried
│   └── UnknownThing    a named instance, request, policy or setting does not exist
├── Refused             a typed no, with a code from `RefusalCode`; nothing happened
├── CommitConflict      another controller committed first; fold on and decide again
├── GenerationChanged   the log lost its memory or restarted; append recent facts again, in order
├── LogUnavailable      the log cannot be reached or refuses writes; retry later
├── ArchiveUnavailable  SQL cannot be reached, is full, or has no tables yet; retry later
├── ArchiveForked       the log shows another fact at a position that is archived already
├── TransferFailed      bytes did not arrive; the move aborts, the request stays
├── ScalerFailed        an instance could not be started or ended; retried a few times
└── EngineFailed        the engine could not do what was asked
"""

from __future__ import annotations


class MidstreamError(Exception):
    """Base of every error this project raises on purpose."""


class BadInput(MidstreamError):
    """The caller said something wrong; repeating it will not help."""


class UnknownThing(BadInput):
    """A name that nobody has: instance, request, policy, transfer, setting."""


class Refused(MidstreamError):
    """A typed refusal: `code` is stable and machine-readable, `reason` is for people."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(f"{code}: {reason}")
        self.code = code
        self.reason = reason


class CommitConflict(MidstreamError):
    """Someone committed after the position this commit was based on."""


class GenerationChanged(MidstreamError):
    """Another generation of the log is open than the caller knew; nothing was appended."""

    def __init__(self, generation: int) -> None:
        super().__init__(f"the log is in generation {generation} now")
        self.generation = generation


class LogUnavailable(MidstreamError):
    """The log cannot be reached, is full, or is not ready; the effect of the call is unknown."""


class ArchiveUnavailable(MidstreamError):
    """The archive's database cannot be reached or refuses; writes may be repeated, they are idempotent."""


class ArchiveForked(MidstreamError):
    """The log holds another fact at an archived position: it lost its memory and its generation with it."""


class TransferFailed(MidstreamError):
    """A transfer broke, was cancelled or ran past its deadline."""


class CannotConnect(TransferFailed):
    """The two ends of a transfer do not reach each other: another transfer may."""


class ScalerFailed(MidstreamError):
    """An instance could not be started or ended; trying again may help."""


class EngineFailed(MidstreamError):
    """The engine could not do what was asked of it."""
