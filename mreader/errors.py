"""The errors that a user meets: what went wrong and where, what to do about it, and the exit status that says so."""

from typing import ClassVar


class MreaderError(Exception):
    """A failure with one line of cause and one line of remedy.

    cause:  what failed and where, one line
    remedy: what to do about it, one line; empty where the cause says it all
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, cause: str, remedy: str = "") -> None:
        super().__init__(f"{cause} ({remedy})" if remedy else cause)
        self.cause = cause
        self.remedy = remedy


class UsageError(MreaderError, ValueError):
    """The call itself is wrong: contradicting options, a budget out of range, a path that is no checkpoint."""

    exit_code = 2


class SourceError(MreaderError):
    """A checkpoint that is damaged, incomplete, contradicts itself or cannot be fetched."""

    exit_code = 3


class UnreachableError(SourceError):
    """The Hub cannot be asked: no network, or offline mode. What was downloaded before may still do."""


class NoSpaceError(MreaderError):
    """The disk is, or would be, too small."""

    exit_code = 4


class VerifyError(MreaderError):
    """A checkpoint is not what its manifest, or its source, says."""

    exit_code = 5


class UnsupportedError(MreaderError):
    """A model type, weight format or format version that this release does not know."""

    exit_code = 6


class QuantizedError(UnsupportedError):
    """Weights that are quantized, by a `method` that can be dequantized, where they are wanted in full."""

    def __init__(self, method: str, command: str = "mreader convert SOURCE OUT --dtype bfloat16") -> None:
        super().__init__(
            f"the weights are quantized ({method}), and an augmented checkpoint holds them in full",
            f"`{command}` dequantizes them",
        )
        self.method = method
