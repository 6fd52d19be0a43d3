"""What a second process finds on disk of graphs with our operators in them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cudnn_ops.compiler import caching
from cudnn_ops.compiler.caching import marked
from tests.cases.compiler import Rewritten


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Folded(nn.Module):
    """Two convolutions, whose norms are folded at once, by a function that is no operator."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(4, 4, 1) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(4) for _ in range(2))
        self.eval().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = norm(conv(x)).relu()
        return x


def test_functions_of_this_package_are_named_in_a_graph():
    found = Rewritten(Folded())
    found(torch.randn(2, 4, 3, 3))
    (graph,) = found.graphs
    names = marked(graph)
    assert list(names) == ["cudnn_ops", "cudnn_ops.compiler.patterns.folding.folded_together"]
    assert len(set(names.values())) == 1
    norm = Rewritten(lambda x, w: F.rms_norm(x, (8,), w))
    norm(torch.randn(3, 8), torch.randn(8))
    assert list(marked(norm.graphs[0])) == ["cudnn_ops"]  # an operator is cached by its name


def test_other_sources_are_another_key(tmp_path, monkeypatch):
    words = []
    for text in ("x = 1", "x = 2"):
        for folder in ("ops", "compiler"):
            (tmp_path / folder).mkdir(exist_ok=True)
            (tmp_path / folder / "part.py").write_text(text if folder == "ops" else "")
        monkeypatch.setattr(caching, "_PACKAGE", tmp_path)
        caching.sources.cache_clear()
        words.append(caching.sources())
    caching.sources.cache_clear()
    assert words[0] != words[1]


@pytest.mark.parametrize("swaps", [True, False])
def test_a_second_compilation_reads_what_the_first_one_wrote(swaps, tmp_path, monkeypatch):
    """All of it: what autograd makes of the graph, too."""
    from torch._dynamo.utils import counters

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    model, x = Folded(), torch.randn(2, 4, 3, 3)
    options: dict[str, Any] = {"swap": ["convolution"] if swaps else []}
    found = []
    for _ in range(2):
        torch._dynamo.reset()
        counters.clear()
        compiled = torch.compile(model, backend="cudnn_ops", options=options)
        torch.testing.assert_close(compiled(x), model(x))
        of_autograd = counters["aot_autograd"]
        names = ("autograd_cache_hit", "autograd_cache_miss", "autograd_cache_bypass")
        found.append(tuple(of_autograd[name] for name in names))
    assert found == [(0, 1, 0), (1, 0, 0)]
