"""The pass as Inductor takes it; imported only where Inductor is used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch._inductor.custom_graph_pass as inductor
from torch._inductor import config
from torch.fx import Graph

from quantattn.fusion.report import record
from quantattn.fusion.rewriting import FusionOptions, fuse

__all__ = ["FusionPass", "add_pass", "remove_pass"]


class FusionPass(inductor.CustomGraphPass):
    """Fuses a post-grad graph; without any state of its own."""

    def __init__(self, options: FusionOptions) -> None:
        self.options = options

    def __call__(self, graph: Graph) -> None:
        """Fuse in place and count what was done."""
        for entry in fuse(graph, self.options):
            record(self.options.uuid, entry)

    def uuid(self) -> str:
        """What Inductor's caches tell passes apart by."""
        return self.options.uuid


class _Chain(inductor.CustomGraphPass):
    """Several passes as one, for the versions of torch whose config takes only one."""

    def __init__(self, passes: Sequence[Any]) -> None:
        self.passes = tuple(passes)

    def __call__(self, graph: Graph) -> None:
        for graph_pass in self.passes:
            graph_pass(graph)

    def uuid(self) -> tuple[Any, ...] | None:
        """None, which keeps graphs out of the caches, as soon as one pass has no name."""
        names = [p.uuid() if isinstance(p, inductor.CustomGraphPass) else None for p in self.passes]
        return None if None in names else tuple(names)


def add_pass(graph_pass: FusionPass) -> None:
    """Let Inductor run a pass after those that it runs already."""
    _install((*_installed(), graph_pass))


def remove_pass(graph_pass: FusionPass) -> None:
    """Take a pass out of Inductor's, and leave the others."""
    _install(tuple(other for other in _installed() if other is not graph_pass))


def _installed() -> tuple[Any, ...]:
    passes = config.post_grad_custom_post_pass
    if isinstance(passes, _Chain):
        return passes.passes
    if isinstance(passes, (list, tuple)):
        return tuple(passes)
    return () if passes is None else (passes,)


def _install(passes: tuple[Any, ...]) -> None:
    takes_several = hasattr(inductor, "get_custom_graph_passes")
    if len(passes) > 1:
        config.post_grad_custom_post_pass = passes if takes_several else _Chain(passes)
    else:
        config.post_grad_custom_post_pass = passes[0] if passes else None
