"""Typed access to parsed JSON that nobody vouches for: a wrong type is an error that says where."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from quantattn.errors import CheckpointError

__all__ = ["JsonObject"]


@dataclass(frozen=True)
class JsonObject:
    """One object of a JSON file, and the way to it.

    A member that is absent or null reads as None (or empty, or the given default).

    Attributes:
        data: The parsed object.
        file: The file's name, for messages.
        path: Dotted path of the object in the file; empty at the top.

    Example:
        >>> config = JsonObject({"text_config": {"num_hidden_layers": 2}}, "config.json")
        >>> config.child("text_config").count("num_hidden_layers")
        2
    """

    data: Mapping[str, object]
    file: str
    path: str = ""

    def place(self, key: str) -> str:
        """Dotted path of a member."""
        return f"{self.path}.{key}" if self.path else key

    def error(self, key: str, expected: str) -> CheckpointError:
        """The error that says what a member is and what was expected of it."""
        place = self.place(key)
        got = repr(self.data.get(key))
        shown = got if len(got) <= 60 else f"{got[:57]}..."
        message = f"{self.file}: {place} is {shown}, expected {expected}"
        return CheckpointError(message, file=self.file, place=place)

    def child(self, key: str) -> JsonObject | None:
        """A member that must be an object.

        Raises:
            CheckpointError: It is something else.
        """
        value = self.data.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(key, "an object")
        return JsonObject(value, self.file, self.place(key))

    def children(self) -> Iterator[tuple[str, JsonObject]]:
        """Every member that is not null; each must be an object.

        Raises:
            CheckpointError: One is something else.
        """
        for key in self.data:
            child = self.child(key)
            if child is not None:
                yield key, child

    def text(self, key: str) -> str | None:
        """A member that must be a string.

        Raises:
            CheckpointError: It is something else.
        """
        value = self.data.get(key)
        if value is None or isinstance(value, str):
            return value
        raise self.error(key, "a string")

    def texts(self, key: str) -> tuple[str, ...]:
        """A member that must be a list of strings.

        Raises:
            CheckpointError: It is something else.
        """
        value = self.data.get(key)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.error(key, "a list of strings")
        return tuple(value)

    def flag(self, key: str, *, default: bool = False) -> bool:
        """A member that must be true or false.

        Raises:
            CheckpointError: It is something else.
        """
        value = self.data.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def count(self, key: str, *, most: int = 2**31 - 1) -> int | None:
        """A member that must be a whole number from 0 to `most`.

        Raises:
            CheckpointError: It is something else.
        """
        value = self.data.get(key)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
            raise self.error(key, f"a whole number from 0 to {most}")
        return value
