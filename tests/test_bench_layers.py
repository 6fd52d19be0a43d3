"""Benchmarks of norms, convolutions and whole steps, run on a CPU: rows, checks and tables."""

from typing import Any

import pytest
import torch
from torch import Tensor

import cudnn_ops
from benchmarks import (
    bench_adaptive_norms,
    bench_conv,
    bench_conv_transpose,
    bench_depthwise,
    bench_image_norms,
    bench_linear,
    bench_max_pool,
    bench_moe,
    bench_norms,
    bench_resnet,
    bench_sdpa,
    bench_train_step,
    harness,
    peers,
    tables,
)
from benchmarks.harness import Rows
from tests.cases.benchmarks import ENV
from tests.cases.benchmarks import on_cpu as on_cpu


class OverwritingSwiGLU(torch.autograd.Function):
    """As Liger's: its backward leaves something else where gate and up were."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return torch.nn.functional.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = ctx.saved_tensors
        results = (
            torch.ops.aten.silu_backward(grad * up, gate),
            grad * torch.nn.functional.silu(gate),
        )
        for saved in (gate, up):
            saved.data.fill_(torch.nan)
        return results


def test_image_norms(on_cpu, monkeypatch):
    bench = bench_image_norms
    monkeypatch.setattr(bench, "gpu_ms", bench_sdpa.gpu_ms)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    small = bench.in_both_orders(
        bench.Case("one", (2, 6, 4, 3), 3), bench.Case("two", (1, 4, 3), 2)
    )
    monkeypatch.setattr(bench, "CASES", small)
    of_batch = (
        bench.BatchCase("three", (3, 4, 3, 2), adds=True, activation="relu"),
        bench.BatchCase("three", (3, 5), is_last=False),
    )
    monkeypatch.setattr(bench, "BATCH_CASES", of_batch)
    rows = Rows(ENV)
    bench.run_part("two", rows, 1)
    bench.run_part("three", rows, 1)
    found = harness.pivot(rows.rows, "gpu_ms")
    assert [case.rsplit(" ", 1)[1] for case in found] == ["fwd", "bwd"] * 4
    assert list(found)[2] == "two 1,4,3 by 2 channels first silu fwd"
    assert list(found)[4] == "three 3,4,3,2 channels last sum relu fwd"
    assert all(list(impls) == ["cudnn_ops", "eager", "compile", "copy"] for impls in found.values())


def test_max_pool(on_cpu, monkeypatch):
    bench = bench_max_pool
    monkeypatch.setattr(bench_image_norms, "gpu_ms", bench_sdpa.gpu_ms)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    small = (
        bench.Case("one", (2, 8, 9, 8), 3, 2, 1),
        bench.Case("two", (2, 3, 6, 6), 2, 2, dtype=torch.float32, is_last=False),
    )
    monkeypatch.setattr(bench, "CASES", small)
    rows = Rows(ENV)
    bench.run_part("one", rows, 1)
    bench.run_part("two", rows, 1)
    found = harness.pivot(rows.rows, "gpu_ms")
    cases = ("one 2,8,9,8 3x3 s2 channels last", "two 2,3,6,6 2x2 s2 channels first float32")
    assert list(found) == [f"{case} {which}" for case in cases for which in ("fwd", "bwd")]
    assert all(list(impls) == ["cudnn_ops", "eager", "compile", "copy"] for impls in found.values())
    assert tables.TABLES["max_pool"].lines(rows.rows)[0]


def test_adaptive_norms(on_cpu, monkeypatch):
    bench = bench_adaptive_norms
    monkeypatch.setattr(bench, "gpu_ms", bench_sdpa.gpu_ms)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    small = bench.with_sums(
        bench.Case("one", 2, 5, 8), bench.Case("two", 1, 3, 8, is_layer=False, of_each_token=True)
    )
    monkeypatch.setattr(bench, "CASES", small)
    monkeypatch.setattr(bench, "PARTS", ("one", "two"))
    rows = Rows(ENV)
    bench.run(rows, 1)
    found = harness.pivot(rows.rows, "gpu_ms")
    assert list(found)[2] == "one 2,5,8 gated sum fwd"
    assert list(found)[-1] == "two 1,3,8 rms gated sum by token bwd"
    assert all(list(impls) == ["cudnn_ops", "eager", "compile", "copy"] for impls in found.values())
    cases = list(map(str, bench_adaptive_norms.CASES))
    assert len(set(cases)) == len(cases)


def test_mixtures(on_cpu, monkeypatch):
    bench = bench_moe
    monkeypatch.setattr(bench, "gpu_ms", bench_sdpa.gpu_ms)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    # torch has a histogram of integers on GPUs alone.
    histc = torch.histc
    monkeypatch.setattr(torch, "histc", lambda x, **kwargs: histc(x.float(), **kwargs))
    small = (bench.Model("one", 4, 2, 16, 24, (8,), (1, 9)), bench.Model("two", 3, 3, 8, 8, ()))
    monkeypatch.setattr(bench, "MODELS", (small[0], small[1]._replace(inference=(5,))))
    monkeypatch.setattr(bench, "PARTS", ("one", "two", "steps"))
    rows = Rows(ENV)
    bench.run(rows, 1)
    found = harness.pivot(rows.rows, "gpu_ms")
    assert list(found)[:5] == [
        *("one 1 inference", "one 9 inference", "one 8 fwd", "one 8 bwd", "two 5 inference"),
    ]
    steps = [f"{step} {way}" for step in ("permute", "combine") for way in ("fwd", "bwd")]
    assert list(found)[5:] == [f"{size} {step}" for size in ("one 9", "two 5") for step in steps]
    for case, impls in found.items():
        if "permute" in case or "combine" in case:
            assert list(impls) == ["cudnn_ops", "torch", "copy"]
        else:
            assert list(impls) == ["cudnn_ops", "transformers", "grouped_mm", "compile"]


def test_depthwise(on_cpu, monkeypatch):
    bench = bench_depthwise
    monkeypatch.setattr(bench, "gpu_ms", bench_sdpa.gpu_ms)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    small = (
        bench.Case("one", 2, 4, (5, 6), 3, 2),
        bench.Case("one", 2, 4, (3, 4, 5), 3, dilation=2),
        bench.Case("two", 2, 4, (9,), 4, is_causal=True),
    )
    monkeypatch.setattr(bench, "CASES", small)
    monkeypatch.setattr(bench, "MODELS", ("one", "two"))
    rows = Rows(ENV)
    bench.run(rows, 1)
    found = harness.pivot(rows.rows, "gpu_ms")
    assert [case.rsplit(" ", 1)[1] for case in found] == ["fwd", "bwd"] * 3
    assert list(found)[::2] == [
        "one 2,4,5x6 k3x3 s2 fwd",
        "one 2,4,3x4x5 k3x3x3 d2 fwd",
        "two 2,4,9 k4 causal fwd",
    ]
    assert all(list(impls) == ["cudnn_ops", "eager", "compile", "copy"] for impls in found.values())
    steps = Rows(ENV)
    bench.run_part("steps", steps, 1)
    by_step = harness.pivot(steps.rows, "gpu_ms")
    assert list(by_step)[:3] == [f"one 2,4,5x6 k3x3 s2 {step}" for step in bench.STEPS]
    assert len(by_step) == 2 * len(bench.STEPS)
    assert all(list(impls) == ["kernel", "torch"] for impls in by_step.values())


def test_there_are_depthwise_convolutions_of_every_kind():
    cases = bench_depthwise.CASES
    assert len(set(map(str, cases))) == len(cases) >= 24
    assert len(bench_depthwise.MODELS) == 6


def test_there_are_image_norms_of_every_kind():
    cases = (*bench_image_norms.CASES, *bench_image_norms.BATCH_CASES)
    assert len(set(map(str, cases))) == len(cases) > 64
    assert {case.group for case in cases} == set(bench_image_norms.PARTS)


@pytest.fixture
def small_norms(on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> dict[str, peers.RowOps]:
    """Makes bench_norms small, with three implementations and eager torch for the compiler."""
    bench = bench_norms
    for name in ("gpu_ms", "host_us"):
        monkeypatch.setattr(bench, name, bench_sdpa.gpu_ms)
    shapes = (bench.Shape(4, 16, "wide", compiled=True), bench.Shape(2, 64, "wide"))
    monkeypatch.setattr(bench, "SHAPES", (*shapes, bench.Shape(3, 4, "odd")))
    for name in ("ADDED", "GATED"):
        monkeypatch.setattr(bench, name, (3, 8))
    monkeypatch.setattr(bench, "HOST", ((3, 8),))
    monkeypatch.setattr(bench, "QK", (2, 3, 4, 8))
    monkeypatch.setattr(bench, "ROTARY", ((2, 3, 4, 2, 8),))
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(peers, "LIGER_WIDEST", 63)
    ops = peers.row_ops("cudnn_ops", "eager")
    ops["liger"] = ops["eager"]._replace(swiglu=OverwritingSwiGLU.apply)
    monkeypatch.setattr(peers, "row_ops", lambda *_: ops)
    return ops


def test_bench_norms_rows_make_its_tables(small_norms: dict[str, peers.RowOps]) -> None:
    rows = Rows(ENV)
    bench_norms.run(rows, rounds=1)
    both = "1.00x / 1.00x"
    assert tables.norms(rows.rows) == [
        ["", "shapes", "vs bound", "vs eager", "vs compile", "vs liger"],
        *(
            line
            for kind in ("rms", "layer")
            for line in (
                [f"{kind} wide", "2", *[both] * 4],
                [f"{kind} odd", "1", both, both, "", both],
            )
        ),
        ["rms QK", "1", *[both] * 4],
        ["add + rms", "1", *["1.00x"] * 4],
        ["swiglu", "1", *[both] * 4],
        ["rotary_qk", "1", *[both] * 3, ""],
    ]
    cases = harness.pivot(rows.rows, "gpu_ms")
    impls = ["cudnn_ops", "eager", "three_pass", "cudnn_ops_new"]
    assert list(cases["rms wide 2,64 bwd"]) == impls
    assert list(cases["swiglu 3,8 bwd"])[-3:] == ["compile", "copy", "cudnn_ops_new"]
    impls = ["cudnn_ops", "two_launches", "eager", "compile", "copy", "cudnn_ops_new"]
    assert list(cases["rotary_qk 2,3,4,2,8 bwd"]) == impls
    header, *lines = tables.host_overhead(rows.rows)
    assert header == ["", "cudnn_ops", "eager"]
    functions = ("rms_norm", "layer_norm", "swiglu")
    assert lines == [
        [f"{function} 3,8, {which}", "2.00", "2.00"]
        for which in ("no grad", "grad")
        for function in functions
    ]


def test_a_key_that_turns_back_is_not_timed(
    small_norms: dict[str, peers.RowOps], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both results are held to those of ours, and both gradients."""
    turn = cudnn_ops.rotary_embedding

    def backward(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return turn(x, cos, sin if x.shape[1] == 4 else -sin)

    monkeypatch.setattr(cudnn_ops, "rotary_embedding", backward)
    case = list(bench_norms.cases(small_norms))[-1]
    with pytest.raises(RuntimeError, match=r"rotary_qk .*: two_launches differs in result 1"):
        bench_norms.measure(case, Rows(ENV), 1)
    assert len(case.grads) == 2


def test_means_of_norms_are_geometric() -> None:
    rows = Rows(ENV)
    for size, ms in (("8,16", 2.0), ("16,16", 8.0)):
        rows.add(f"rms wide {size} fwd", "cudnn_ops", "gpu_ms", 1.0)
        rows.add(f"rms wide {size} fwd", "eager", "gpu_ms", ms)
    assert tables.norms(rows.rows)[1] == ["rms wide", "2", "", "4.00x", "", ""]


def test_wrong_norms_are_not_timed(small_norms: dict[str, peers.RowOps]) -> None:
    right = small_norms["eager"].rms_norm
    small_norms["eager"] = small_norms["eager"]._replace(
        rms_norm=lambda x, weight: right(x, weight.detach() * 1.1 + weight * 0)
    )
    case = next(bench_norms.cases(small_norms))
    with pytest.raises(RuntimeError, match="rms wide 4,16: eager differs in result 0"):
        bench_norms.measure(case, Rows(ENV), 1)


def test_heads_to_be_normed_are_part_of_a_projection(small_norms: dict[str, peers.RowOps]) -> None:
    case = next(c for c in bench_norms.cases(small_norms) if c.name.startswith("rms QK"))
    heads = case.calls["cudnn_ops"].leaves[0]
    assert heads.shape == (2, 3, 4, 8)
    assert heads.stride() == (3 * 12 * 8, 12 * 8, 8, 1)


KERNELS = {
    "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NTN": "matmul",
    "void cublasLt::splitKreduce_kernel<32, 16, int, float>": "matmul",
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16": "attention",
    "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128>>": "attention",
    "rms_norm_backward_4": "norms",
    "norm_columns": "norms",
    "gated_swiglu_bf16_backward": "gated activation",
    "void at::native::(anonymous namespace)::cunn_SoftMaxForward<8, float>": "loss",
    "void at::native::elementwise_kernel<128, 4, direct_copy_kernel_cuda>": (
        "copies, casts and fills"
    ),
    "Memset (Device)": "copies, casts and fills",
    "void at::native::vectorized_elementwise_kernel<4, CUDAFunctor_add<float>>": (
        "other elementwise"
    ),
    "void at::native::reduce_kernel<512, 1>": "other",
}


def test_kernels_are_grouped_by_name() -> None:
    assert {name: bench_train_step.group_of(name) for name in KERNELS} == KERNELS
    found = bench_train_step.shares(dict.fromkeys(KERNELS, 10.0) | {"gemm": 380.0})
    assert next(iter(found)) == "matmul"
    assert found["matmul"] == pytest.approx(80)
    assert sum(found.values()) == pytest.approx(100)
    with pytest.raises(RuntimeError, match="no kernel"):
        bench_train_step.shares({})


@pytest.mark.usefixtures("on_cpu")
def test_bench_train_step_rows_make_its_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = bench_train_step
    config = bench.LlamaConfig(
        num_hidden_layers=2,
        hidden_size=64,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=97,
    )
    monkeypatch.setattr(bench, "CONFIG", config)
    monkeypatch.setattr(bench, "SHAPES", ((2, 24), (1, 48)))
    monkeypatch.setattr(bench, "step_ms", bench_sdpa.gpu_ms)
    monkeypatch.setattr(bench, "kernel_times", lambda call: {"gemm": 3.0, "norm_4": 1.0})
    variants, randint = bench.variants, torch.randint
    monkeypatch.setattr(bench, "variants", lambda: variants("cpu"))
    monkeypatch.setattr(torch, "randint", lambda *a, **k: randint(*a, **{**k, "device": "cpu"}))
    monkeypatch.setattr(torch, "compile", lambda model, **_: model)
    rows = Rows(ENV)
    bench.run(rows, rounds=1)
    impls = ["eager", "compile", "cudnn_ops", "cudnn_ops_compile"]
    assert tables.train_step(rows.rows) == [
        ["sequences x tokens", *impls, "vs eager", "compiled vs compile"],
        *([case, *["2.00"] * 4, *["1.00x"] * 2] for case in ("2x24", "1x48")),
    ]
    header, *lines = tables.train_step_profile(rows.rows)
    assert header == ["", "2x24", "1x48"]
    assert lines[:3] == [
        ["matmul", "75.0%", "75.0%"],
        ["norms", "25.0%", "25.0%"],
        ["gated activation", "0.0%", "0.0%"],
    ]


def test_other_gradients_are_not_timed() -> None:
    steps = {"eager": lambda: torch.ones(4), "cudnn_ops": lambda: torch.full((4,), 1.2)}
    with pytest.raises(RuntimeError, match=r"cudnn_ops: a gradient is 0\.2 of its norm off"):
        bench_train_step.verify(steps)


@pytest.mark.usefixtures("on_cpu")
def test_bench_conv_rows_make_its_table(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = bench_conv
    monkeypatch.setattr(bench, "SHAPES", (bench.Shape(2, 4, 6, 8, 3, 1, 1),))
    monkeypatch.setattr(bench, "PATCHES", bench.Shape(2, 3, 8, 8, 4, 4, 0))
    monkeypatch.setattr(bench, "PARTS", bench.PARTS[:1])
    monkeypatch.setattr(bench, "gpu_ms", bench_sdpa.gpu_ms)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    randn = torch.randn
    monkeypatch.setattr(torch, "randn", lambda *a, **k: randn(*a, **{**k, "device": "cpu"}))
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    rows = Rows(ENV)
    bench.run(rows, rounds=1)
    same = ["2.00", "1.00", "1.00x", "1.00x", "1.00x"]
    assert tables.conv(rows.rows) == [
        [
            *("N, C, HW, K, R, stride, pad", "fwd", "/ conv alone"),
            *("vs eager", "vs compile", "bwd vs eager"),
        ],
        *(["2, 4, 6, 8, 3, 1, 1 " + epilogue.name, *same] for epilogue in bench.EPILOGUES),
        ["2, 3, 8, 8, 4, 4, 0 patches", *same],
        ["geometric mean without patches", "", "", *same[2:]],
    ]


@pytest.mark.usefixtures("on_cpu")
def test_transposed_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = bench_conv_transpose
    cases = list(map(str, bench.CASES))
    assert len(set(cases)) == len(cases)
    small = tuple(
        bench.Case("some", 2, 6, (5, 4, 3)[:dims], 4, 4, 2, 1, "relu") for dims in (1, 2, 3)
    )
    monkeypatch.setattr(bench, "CASES", small)
    monkeypatch.setattr(bench, "PARTS", ("some",))
    monkeypatch.setattr(bench_conv, "gpu_ms", bench_sdpa.gpu_ms)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    randn = torch.randn
    monkeypatch.setattr(torch, "randn", lambda *a, **k: randn(*a, **{**k, "device": "cpu"}))
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    rows = Rows(ENV)
    bench.run(rows, 1)
    found = harness.pivot(rows.rows, "gpu_ms")
    assert list(found)[2] == "some 2,6,5x4,4,4,2,1 relu fwd"
    for case, impls in found.items():
        last = [bench.BARE] if case.endswith("fwd") else []
        peers = ["cudnn_ops", "eager", *(["compile"] if last else [])]
        assert list(impls) == [*peers, *last]


@pytest.mark.usefixtures("on_cpu")
def test_bench_linear_rows_make_its_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = bench_linear
    monkeypatch.setattr(bench, "SHAPES", (bench.Shape(6, 16, 8),))
    mlps = (bench.Mlp("GPT", 6, 8, 16, "gelu_tanh"), bench.Mlp("L", 6, 8, 16, "silu", gated=True))
    monkeypatch.setattr(bench, "MLPS", mlps)
    monkeypatch.setattr(bench, "PARTS", ("6,16,8 fwd", "6,16,8 bwd", "GPT", "L", "host"))
    for name in ("gpu_ms", "host_us"):
        monkeypatch.setattr(bench, name, bench_sdpa.gpu_ms)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    rows = Rows(ENV)
    bench.run(rows, rounds=30)
    ours, peers = ["2.00", "1.00"], ["1.00x"] * 3
    assert tables.linear(rows.rows) == [
        [
            *("rows, outputs, inputs", "ms", "/ bare product", "vs eager", "vs compile"),
            *("vs compile max-autotune", "vs addmm_activation"),
        ],
        ["6, 16, 8 gelu_tanh fwd", *ours, *peers, "1.00x"],
        ["6, 16, 8 gelu_tanh, kept, fwd", *ours, "1.00x", "", "", ""],
        ["6, 16, 8 relu fwd", *ours, *peers, "1.00x"],
        *(
            line
            for name in ("gelu", "silu")
            for line in (
                [f"6, 16, 8 {name} fwd", *ours, *peers, ""],
                [f"6, 16, 8 {name}, kept, fwd", *ours, "1.00x", "", "", ""],
            )
        ),
        *(
            line
            for name in ("gelu_tanh", "gelu")
            for line in (
                [f"6, 16, 8 {name} with the bias's bwd", *ours, *peers, ""],
                [
                    *(f"6, 16, 8 {name} with the bias's and the weight's bwd", *ours),
                    *("1.00x", "", "", ""),
                ],
            )
        ),
    ]
    assert tables.mlp(rows.rows) == [
        [
            *("tokens, width, hidden", "ms", "/ products", "vs eager", "vs compile"),
            "vs compile max-autotune",
        ],
        ["GPT 6, 8, 16 gelu_tanh", *ours, *peers],
        ["L 6, 8, 16 silu", *ours, *peers],
        ["geometric mean", "", "1.00", *peers],
    ]
    quick = Rows(ENV)
    bench.run(quick, rounds=harness.QUICK_ROUNDS)
    assert not [row for row in quick.rows if "compile" in row["impl"]]


def test_other_logits_are_not_timed() -> None:
    calls = {"eager": lambda: torch.ones(4), "cudnn_ops": lambda: torch.full((4,), 1.2)}
    with pytest.raises(RuntimeError, match=r"inference: cudnn_ops is 0\.2 of the norm off"):
        bench_resnet.verify("inference", calls)


def test_a_table_of_steps() -> None:
    rows = Rows(ENV)
    rows.add("inference", "cudnn_ops", "step_ms", 1.0)
    rows.add("inference", "eager", "step_ms", 1.5)
    assert tables.steps(rows.rows) == [
        ["", "cudnn_ops", "eager", "vs eager"],
        ["inference", "1.00", "1.50", "1.50x"],
    ]


def test_the_table_of_serving() -> None:
    rows = Rows(ENV)
    for impl, rate in (("cudnn_ops", 900.0), ("transformers", 300.0)):
        rows.add("trace", impl, "tokens_per_s", rate)
    for wait in ("first_token", "between_tokens"):
        rows.add("trace", "cudnn_ops", f"{wait}_p50_ms", 12.0)
        rows.add("trace", "cudnn_ops", f"{wait}_p99_ms", 25.0)
    waits = ["first token p50", "first token p99", "between tokens p50", "between tokens p99"]
    assert tables.serving(rows.rows) == [
        ["", "by", "tokens/s", *(f"{wait}, ms" for wait in waits)],
        ["trace", "cudnn_ops", "900", "12.0", "25.0", "12.0", "25.0"],
        ["trace", "transformers", "300", "", "", "", ""],
    ]


def test_a_table_beside_peers() -> None:
    rows = Rows(ENV)
    for case, impl, ms in (
        ("a 8,2 fwd", "cudnn_ops", 2.0),
        ("a 8,2 fwd", "eager", 4.0),
        ("a 8,2 fwd", "compile", 1.0),
        ("a 8,2 bwd", "cudnn_ops", 1.0),
        ("a 8,2 bwd", "eager", 3.0),
        ("b fwd", "cudnn_ops", 1.0),
        ("b fwd", "eager", 8.0),
        ("a 8,2 forward", "kernel", 1.0),
        ("a 8,2 forward", "torch", 2.0),
        ("alone", "cudnn_ops", 0.5),
        ("alone", "copy", 0.25),
    ):
        rows.add(case, impl, "gpu_ms", ms)
    rows.add("alone", "other", "error", 0.1)
    assert tables.beside_peers(rows.rows) == [
        ["", "ms", "vs eager", "vs compile", "vs copy"],
        ["a 8, 2", "2.00 / 1.00", "2.00x / 3.00x", "0.50x / -", ""],
        ["b", "1.00", "8.00x", "", ""],
        ["alone", "0.500", "", "", "0.50x"],
        ["geometric mean", "", "4.00x / 3.00x", "0.50x / -", "- / -"],
    ]
    assert tables.beside_peers(rows.rows[9:])[-1][0] == "alone"
