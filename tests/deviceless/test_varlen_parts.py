"""How the gradients of packed attention are cut where cuDNN's are wrong beyond 2^31 elements.

Plans of a part that is still too large are refused, so that a call that returns was cut rightly.
"""

from __future__ import annotations

import pytest

from tests.deviceless.fake_cudnn import build_fakes, run_program

#: How many of the calls below returned; of the others, what they raised.
PROGRAM = """
def attend(heads, heads_kv, lengths, longest):
    def draw(count):
        return torch.empty(sum(lengths), count, 128, dtype=torch.bfloat16, device="cuda")
    q, k, v, grad, out = (draw(n) for n in (heads, heads_kv, heads_kv, heads, heads))
    starts = torch.empty(len(lengths) + 1, dtype=torch.int32, device="cuda")
    lse = torch.empty(heads, sum(lengths), device="cuda")
    torch.ops.cudnn_ops._varlen_backward(
        grad, q, k, v, out, lse, starts, starts, longest, longest, causal=True, window_size=(200, 0)
    )

for heads, heads_kv, lengths in (
    (64, 4, [9000, 1, 70000, 190000]),  # 2.05 parts of the elements that are declared
    (64, 4, [9000, 1, 70000, 250000]),
    (48, 3, [250000, 1000]),
    (96, 6, [190000, 1]),
    (16, 16, [500000, 129, 600000]),
    (40, 40, [129] * 3000),
):
    attend(heads, heads_kv, lengths, max(lengths))
print("done")
"""


@pytest.fixture(scope="module")
def preload(tmp_path_factory: pytest.TempPathFactory) -> str:
    return build_fakes(tmp_path_factory.mktemp("fakes"))


def test_parts_of_heads_are_small_enough(preload):
    done = run_program(preload, PROGRAM)
    assert done.stdout.split() == ["done"], done.stderr
