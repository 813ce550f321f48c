"""A progress bar on standard error while tensors are copied; nothing where that is no terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

__all__ = ["with_progress"]


def with_progress(keys: Sequence[str], sizes: Sequence[int], title: str) -> Iterator[str]:
    """Yield keys, and show how many of their bytes are done.

    Args:
        keys: What is worked on, in order.
        sizes: Bytes of each.
        title: Text before the bar.
    """
    if not sys.stderr.isatty():
        yield from keys
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(title, total=sum(sizes))
        for key, size in zip(keys, sizes, strict=True):
            yield key
            progress.advance(task, size)
