"""How code that inductor generates calls our operators: past torch.ops (:mod:`cudnn_ops.ops.call`).

What inductor knows of a call is a fallback's, whoever makes it: memory, aliases, what is written
to, C++ wrappers and their own ways. Only the name of what Python calls is another, and a line in
front of the generated code says what it is. Code that comes out of inductor's cache has that line,
so that it imports what it calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch._inductor import ir
from torch._inductor.virtualized import V
from torch.utils._pytree import tree_map


class GraphCall(ir.FallbackKernel):
    """A fallback whose operator has a fast call."""

    def codegen(self, wrapper: Any) -> None:
        """As a fallback's, once the wrapper has imported what it calls."""
        if _is_python():
            name, overload = self._names()
            wrapper.add_import_once("from cudnn_ops.ops.call import graph_call")
            wrapper.add_import_once(
                f"{self.get_kernel_name()} = graph_call({name!r}, {overload!r}, "
                f"is_first_read={self._is_first_read()})"
            )
        super().codegen(wrapper)

    def get_kernel_name(self) -> str:
        """What the generated code calls."""
        if not _is_python():
            return super().get_kernel_name()
        names = "_".join(name for name in self._names() if name)
        return f"cudnn_ops_{names}{'_first' if self._is_first_read() else ''}"

    def _names(self) -> tuple[str, str]:
        schema = cast(torch._ops.OpOverload, self.op_overload)._schema
        return schema.name.removeprefix("cudnn_ops::"), schema.overload_name

    def _is_first_read(self) -> bool:
        """Whether the scheduler found that nobody reads a result behind the first one."""
        _, *others = self.outputs
        removed = V.graph.removed_buffers
        return bool(others) and all(
            isinstance(one, ir.MultiOutput) and one.get_name() in removed for one in others
        )


def _is_python() -> bool:
    return not V.graph.cpp_wrapper and not V.graph.fx_wrapper


def lowering_of(operator: torch._ops.OpOverload) -> Callable[..., Any]:
    """What inductor's own handler of fallbacks would be, with the other kernel."""

    def handler(*args: Any, **kwargs: Any) -> Any:
        return tree_map(_result, GraphCall.create(operator, *args, **kwargs))

    handler._is_fallback_handler = True  # type: ignore[attr-defined]
    return handler


def _result(one: Any) -> Any:
    if isinstance(one, ir.MultiOutput):
        # Python would take a third of a microsecond to look at sizes and strides. Those of fake
        # kernels are compared with those of kernels by this package's tests.
        one.skip_size_stride_alignment_checks = True
    return ir.TensorBox.create(one) if isinstance(one, ir.IRNode) else one
