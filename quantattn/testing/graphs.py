"""A torch.compile backend that shows what the fusions make of a graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

from torch.fx import Graph, GraphModule

from quantattn.fusion import FusionOptions, FusionRecord, FusionReport, fuse, target_name

__all__ = ["GraphRecorder", "count_ops"]


class GraphRecorder:
    """Compile by fusing alone: graphs are kept as they were and as they became, and then run.

    What reaches the fusions is a functional graph of ATen operators, as under Inductor; no code is
    generated, so that a test takes a fraction of the time.

    Args:
        options: How to fuse; None: nothing is, for the unfused run.

    Attributes:
        before: Each graph as it was captured.
        after: The same graphs after the fusions.

    Example:
        >>> recorder = GraphRecorder()
        >>> torch.compile(torch.nn.ReLU(), backend=recorder)(torch.tensor([-2.0, 2.0]))
        tensor([0., 2.])
        >>> count_ops(recorder.after[0])["aten::relu"], recorder.report().fused
        (1, ())
    """

    def __init__(self, options: FusionOptions | None = FusionOptions()) -> None:  # noqa: B008
        self.options = options
        self.before: list[Graph] = []
        self.after: list[Graph] = []
        self._records: list[FusionRecord] = []

    def __call__(self, module: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """What torch.compile calls with each graph that it captures."""
        from torch._dynamo.backends.common import aot_autograd
        from torch._inductor.decomposition import select_decomp_table

        compiler = aot_autograd(fw_compiler=self._compile, decompositions=select_decomp_table())
        compiled: Callable[..., Any] = compiler(module, inputs)
        return compiled

    def report(self) -> FusionReport:
        """What was fused in all graphs, and what not and why."""
        return FusionReport.of(self._records)

    def _compile(self, module: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        self.before.append(deepcopy(module.graph))
        if self.options is not None:
            self._records += fuse(module.graph, self.options)
            module.graph.lint()
            module.recompile()
        self.after.append(deepcopy(module.graph))
        return module


def count_ops(graph: Graph) -> Counter[str]:
    """How often a graph calls each operator, as `namespace::name`.

    A write that the compiler has made functional counts as the operator that writes.

    Example:
        >>> recorder = GraphRecorder()
        >>> _ = torch.compile(torch.nn.ReLU(), backend=recorder)(torch.ones(2))
        >>> count_ops(recorder.before[0])
        Counter({'aten::relu': 1})
    """
    called = (node for node in graph.nodes if node.op == "call_function")
    targets = (target for node in called for target in (node.target, *node.args[:1]))
    return Counter(name for name in map(target_name, targets) if name is not None)
