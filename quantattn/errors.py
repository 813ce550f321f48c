"""Every exception that quantattn raises on purpose.

ValueError
└── QuantAttnError
    ├── ScaleError              a scale that cannot be used: names layer, role, value, key and file
    │   └── RefusedCheckpointError
    ├── CheckpointError         a checkpoint that cannot be read: names the file and the place in it
    │   └── RefusedCheckpointError  (one class under both: every problem of one checkpoint)
    └── FormatError             what a kernel, a layout or a cache format cannot do, and what it can
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = [
    "CheckpointError",
    "FormatError",
    "Problem",
    "QuantAttnError",
    "RefusedCheckpointError",
    "ScaleError",
]


class QuantAttnError(ValueError):
    """Base of every error that quantattn raises on purpose."""


class ScaleError(QuantAttnError):
    """A scale is invalid, does not fit its layer, or may not be changed now."""

    def __init__(
        self,
        message: str,
        *,
        layer: str | None = None,
        role: str | None = None,
        value: object = None,
        key: str | None = None,
        file: str | None = None,
    ) -> None:
        # The message is kept by __new__; a call of __init__ here is one that Dynamo cannot trace.
        self.layer = layer
        self.role = role
        self.value = value
        self.key = key
        self.file = file


class CheckpointError(QuantAttnError):
    """A checkpoint file is damaged, hostile or missing.

    `place` is what locates the fault inside `file`: a tensor's key, a byte offset, or a JSON path.
    """

    def __init__(self, message: str, *, file: str | None = None, place: str | None = None) -> None:
        super().__init__(message)
        self.file = file
        self.place = place


@dataclass(frozen=True)
class Problem:
    """One reason why a checkpoint is refused, or one thing in it that was left aside.

    Attributes:
        code: Short name of the kind, lower case (`nonpositive`, `unknown_scale`, ...).
        key: The tensor's key in the checkpoint; None where no single key is at fault.
        file: The file the key is in, relative to the checkpoint.
        message: What was found, what was expected, what to do.
    """

    code: str
    key: str | None
    file: str | None
    message: str

    def __str__(self) -> str:
        place = f" ({self.file})" if self.file else ""
        return f"{self.message}{place} [{self.code}]"


class RefusedCheckpointError(ScaleError, CheckpointError):
    """A readable checkpoint whose scales are refused; nothing of the model was changed.

    `problems` holds every fault that was found, not only the first.
    """

    def __init__(self, message: str, problems: Sequence[Problem] = ()) -> None:
        first = problems[0] if problems else None
        super().__init__(
            message, key=first.key if first else None, file=first.file if first else None
        )
        self.args = (message,)
        self.place = self.key
        self.problems = tuple(problems)


class FormatError(QuantAttnError):
    """A cache format, shape, dtype or device that an operation cannot serve."""
