"""The benchmarks' pure parts, tested without a GPU: clocks, rows, checks, reports, tables."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks import (
    bench_attention_features,
    bench_cold_start,
    bench_conv,
    bench_host_overhead,
    bench_norms,
    bench_paged_decode,
    bench_resnet,
    bench_sdpa,
    bench_shape_churn,
    bench_soak,
    bench_train_step,
    gpu_suite,
    harness,
    peers,
    tables,
)
from benchmarks.harness import Rows

SHAPE = bench_sdpa.Shape(2, 4, 2, 48, 16, causal=True)
ENV: dict[str, str | int] = {
    "gpu": "NVIDIA H200",
    "commit": "0123456789abcdef0123456789abcdef01234567-dirty",
    "date": "2026-11-21",
    "torch": "2.11.0",
    "cudnn": 91900,
    "rounds": 50,
}


class Gpu:
    """Stands in for torch.cuda: logs what it is asked, and its events pass after a long sleep."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.sleeps: list[int] = []
        self.sleep_needed = 0
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: self.log.append("synchronize"))
        monkeypatch.setattr(torch.cuda, "_sleep", self.sleeps.append)
        monkeypatch.setattr(torch.cuda, "Event", self.event)

    def event(self, **_: bool) -> SimpleNamespace:
        return SimpleNamespace(
            record=lambda: None,
            synchronize=lambda: None,
            query=lambda: self.sleeps[-1] < self.sleep_needed,
            elapsed_time=lambda _: float(len(self.sleeps)),
        )

    @contextmanager
    def around(self, name: str) -> Iterator[None]:
        self.log.append(f"enter {name}")
        yield
        self.log.append(f"leave {name}")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(monkeypatch)


@pytest.mark.parametrize(
    ("has_gpu", "arguments", "message"),
    [(False, [], "needs a CUDA GPU"), (True, ["--out", "no/such/x.json"], "is not a folder")],
)
def test_bad_arguments_end_with_a_line(has_gpu, arguments, message, monkeypatch, capsys):
    """And status 2, before anything is measured."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr("sys.argv", ["bench_x", *arguments])
    with pytest.raises(SystemExit) as ended:
        harness.main("x", lambda rows, rounds: pytest.fail("it measures"))
    assert ended.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_host_time_leaves_synchronization_and_settings_out(gpu: Gpu) -> None:
    times = harness.host_us({"ours": lambda: gpu.log.append("call")}, rounds=1, around=gpu.around)
    warm_up = ["enter ours", *["call"] * harness.WARM_UP_CALLS, "leave ours"]
    batch = ["synchronize", *["call"] * harness.HOST_CALLS, "synchronize"]
    assert gpu.log == [*warm_up, "enter ours", *batch, "leave ours"]
    assert 0 < times["ours"] < 1000


def test_gpu_time_is_taken_only_once_every_call_was_queued(gpu: Gpu) -> None:
    gpu.sleep_needed = 4 * harness.SLEEP_CYCLES
    times = harness.gpu_ms({"ours": lambda: None}, rounds=1)
    assert gpu.sleeps == [harness.SLEEP_CYCLES << doubling for doubling in range(3)]
    assert times == {"ours": 3 / harness.GPU_CALLS}


def test_gpu_time_of_a_function_that_waits_is_refused(gpu: Gpu) -> None:
    gpu.sleep_needed = 1 << 62
    with pytest.raises(RuntimeError, match="waits for the GPU"):
        harness.gpu_ms({"ours": lambda: None}, rounds=1)


def test_a_step_begins_on_an_idle_gpu_and_is_not_put_off(gpu: Gpu) -> None:
    gpu.sleeps.append(0)  # what the events' time is made of
    assert harness.step_ms({"ours": lambda: gpu.log.append("call")}, rounds=2) == {"ours": 1.0}
    assert gpu.log == [*["call"] * harness.WARM_UP_CALLS, *["synchronize", "call"] * 2]


def test_rounds_hold_every_function_in_changing_order(gpu: Gpu) -> None:
    harness.gpu_ms(dict.fromkeys("abc", lambda: None), rounds=20, around=gpu.around)
    entered = [entry[-1] for entry in gpu.log if entry.startswith("enter")]
    rounds = ["".join(entered[i : i + 3]) for i in range(3, len(entered), 3)]
    assert len(rounds) == 20
    assert {"".join(sorted(names)) for names in rounds} == {"abc"}
    assert len(set(rounds)) > 3


def test_rows_are_written_as_json(tmp_path: Path) -> None:
    rows = Rows(ENV)
    rows.add("small", "cudnn_ops", "gpu_ms", 0.25)
    rows.write(tmp_path / "new" / "out.json")
    rows.add("large", "cudnn_ops", "gpu_ms", float("nan"))
    with pytest.raises(ValueError, match="not JSON compliant"):
        rows.write(tmp_path / "nan.json")
    assert json.loads((tmp_path / "new" / "out.json").read_text()) == {
        "env": ENV,
        "rows": [{"case": "small", "impl": "cudnn_ops", "metric": "gpu_ms", "value": 0.25}],
    }


def test_table_has_a_ratio_for_each_peer() -> None:
    rows = Rows(ENV)
    rows.add("small", "cudnn_ops", "gpu_ms", 0.26)
    rows.add("small", "torch_flash", "gpu_ms", 0.39)
    rows.add("large", "cudnn_ops", "gpu_ms", 12.0)
    rows.add("small", "torch_flash", "peak_mib", 1024.0)
    assert rows.table().splitlines() == [
        "gpu_ms  cudnn_ops  torch_flash  torch_flash/ours",
        "small       0.260        0.390              1.50",
        "large        12.0            -                 -",
        "",
        "peak_mib  torch_flash",
        "small            1024",
    ]


def test_short_numbers() -> None:
    values = (0.0856, 0.5, 100.0, 999.6, 12345.6)
    assert [harness.short(v) for v in values] == ["0.0856", "0.500", "100", "1000", "12346"]


def test_commit_is_dirty_when_the_code_differs_but_not_when_results_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@example.com")
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True)

    monkeypatch.delenv("CUDNN_OPS_COMMIT", raising=False)
    monkeypatch.setattr(harness, "ROOT", tmp_path)
    git("init", "-q")
    assert harness.commit() == "unknown"
    git("commit", "-q", "--allow-empty", "-m", "first")
    assert len(head := harness.commit()) == 40
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    (results / "sdpa.json").touch()
    assert harness.commit() == head
    (tmp_path / "code.py").touch()
    assert harness.commit() == f"{head}-dirty"
    monkeypatch.setenv("CUDNN_OPS_COMMIT", "told")
    assert harness.commit() == "told"


def test_a_torch_backend_is_selected_alone_and_only_inside_its_context() -> None:
    def enabled() -> tuple[bool, bool]:
        cuda = torch.backends.cuda
        return cuda.flash_sdp_enabled(), cuda.cudnn_sdp_enabled()

    before = enabled()
    for name, expected in (
        ("torch_flash", (True, False)),
        ("torch_cudnn", (False, True)),
        ("torch_default", before),
        ("cudnn_ops", before),
    ):
        with peers.backend(name):
            assert enabled() == expected
        assert enabled() == before


def test_only_third_parties_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    monkeypatch.setitem(sys.modules, "cudnn_ops", None)
    assert list(peers.sdpa("torch_flash", "flash_attn_4")) == ["torch_flash"]
    with pytest.raises(ImportError):
        peers.sdpa("cudnn_ops")


def test_liger_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    assert list(peers.row_ops("cudnn_ops", "eager", "liger")) == ["cudnn_ops", "eager"]


@pytest.mark.parametrize("causal", [True, False])
def test_sdpa_results_are_verified(causal: bool) -> None:
    shape = SHAPE._replace(causal=causal)
    q, k, v, grad_out = bench_sdpa.tensors(shape, "cpu")
    expected = bench_sdpa.reference(shape, q, k, v, grad_out)

    def results(is_causal: bool) -> list[torch.Tensor]:
        out = scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)
        return [out, *torch.autograd.grad(out, (q, k, v), grad_out)]

    good = results(causal)
    bench_sdpa.verify("right", shape, good, expected)
    with pytest.raises(RuntimeError, match="wrong mask: out is"):
        bench_sdpa.verify("wrong mask", shape, results(not causal), expected)
    for place, name in enumerate(("out", "dq", "dk", "dv")):
        broken = list(good)
        broken[place] = broken[place] * torch.nan
        with pytest.raises(RuntimeError, match=f"{name} is nan"):
            bench_sdpa.verify("broken", shape, broken, expected)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a benchmark run here: each function is called once and is said to take 2."""

    def clock(functions: harness.Functions, **_: object) -> dict[str, float]:
        for function in functions.values():
            function()
        return dict.fromkeys(functions, 2.0)

    tensors, randn = bench_sdpa.tensors, torch.randn
    monkeypatch.setattr(bench_sdpa, "tensors", lambda shape, _: tensors(shape, "cpu"))
    monkeypatch.setattr(bench_sdpa, "SHAPES", (SHAPE,))
    monkeypatch.setattr(bench_sdpa, "gpu_ms", clock)
    monkeypatch.setattr(bench_sdpa, "peak_bytes", lambda function: len(function()) * 2**20)
    monkeypatch.setattr(bench_host_overhead, "host_us", clock)
    for name in ("SHAPES", "tensors", "gpu_ms"):
        monkeypatch.setattr(bench_shape_churn, name, getattr(bench_sdpa, name))
    monkeypatch.setattr(torch, "randn", lambda *a, **k: randn(*a, **{**k, "device": "cpu"}))
    monkeypatch.setattr(peers, "backend", lambda _: nullcontext())
    monkeypatch.setattr(peers, "sdpa", lambda *n: dict.fromkeys(n, scaled_dot_product_attention))


@pytest.mark.usefixtures("on_cpu")
def test_bench_sdpa_rows_make_its_table() -> None:
    rows = Rows(ENV)
    bench_sdpa.run(rows, rounds=1)
    tflops = {case: v["cudnn_ops"] for case, v in harness.pivot(rows.rows, "tflops").items()}
    case, forward = "2,4,2,48,16 causal", 2 * 2 * 4 * 48 * 48 * 16 / 2e-3 / 1e12
    assert tflops == pytest.approx({f"{case} fwd": forward, f"{case} bwd": 2.5 * forward})
    peaks = {f"{case} fwd + bwd": {"cudnn_ops": 3.0, "torch_cudnn": 3.0}}
    assert harness.pivot(rows.rows, "peak_mib") == peaks
    peer_names = ["torch_cudnn", "torch_flash", "flash_attn_4"]
    assert tables.sdpa(rows.rows) == [
        ["B, Hq, Hkv, S, D", "cudnn_ops", *peer_names, *(f"vs {peer}" for peer in peer_names)],
        ["2, 4, 2, 48, 16 causal", *["2.00 / 2.00"] * 4, *["1.00x / 1.00x"] * 3],
    ]


def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Any,
    block_mask: Any,
    enable_gqa: bool,
) -> torch.Tensor:
    """FlexAttention's formula, differentiable on a CPU."""
    group = query.shape[1] // key.shape[1] if enable_gqa else 1
    key, value = (t.repeat_interleave(group, 1) for t in (key, value))
    scores = query @ key.mT * query.shape[-1] ** -0.5
    sizes = enumerate(scores.shape)
    index = [torch.arange(n).view([-1 if d == dim else 1 for d in range(4)]) for dim, n in sizes]
    if score_mod is not None:
        scores = score_mod(scores, *index)
    if block_mask is not None:
        scores = scores.masked_fill(~block_mask.mask_mod(*index), -torch.inf)
    return scores.softmax(-1).to(value.dtype) @ value


def varlen_attn(*args: Any, window_size: tuple[int, int]) -> torch.Tensor:
    assert window_size == (-1, 0)
    return torch.ops.cudnn_ops.varlen_attention(*args, causal=True)


@pytest.mark.usefixtures("on_cpu")
def test_bench_attention_features_rows_make_its_table(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = bench_attention_features
    for name in ("tensors", "gpu_ms"):
        monkeypatch.setattr(bench, name, getattr(bench_sdpa, name))
    shape = bench_sdpa.Shape(2, 8, 2, 300, 16, causal=True)
    monkeypatch.setattr(bench, "SHORT", shape)
    monkeypatch.setattr(bench, "LONG", shape._replace(length=1100))
    monkeypatch.setattr(bench, "flex_attention", flex_attention)
    monkeypatch.setattr(bench, "varlen_attn", varlen_attn)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    rows = Rows(ENV)
    bench.run(rows, rounds=1)
    header, *lines = tables.attention_features(rows.rows)
    peer_names = ["torch_cudnn", "flex_attention", "torch_flash", "torch_efficient", "torch_varlen"]
    assert header == [
        "B, Hq, Hkv, S, D",
        "cudnn_ops",
        "over causal",
        *(f"vs {peer}" for peer in peer_names),
    ]
    assert [line[0].partition(" 16 ")[2] for line in lines] == [
        "causal",
        "window 256",
        "ALiBi",
        "softcap",
        "sinks",
        "dropout",
        "deterministic",
        "mask [S, S]",
        "bias [1, H, S, S] and its gradient",
        "padding",
        "packed",
        "causal",
        "window 1024",
    ]
    same = "1.00x / 1.00x"
    assert lines[0] == ["2, 8, 2, 300, 16 causal", "2.00 / 2.00", same, same, "", "", "", ""]
    assert lines[-1][2:5] == [same, "", same]
    # Wrong results are not timed.
    feature = next(bench.features(shape))
    wrong = {**feature.calls, "torch_cudnn": lambda: 1.1 * feature.calls["cudnn_ops"]()}
    with pytest.raises(RuntimeError, match=r"causal: torch_cudnn differs by 0\.1 of"):
        bench.measure(replace(feature, calls=wrong), shape, rows, 1)


@pytest.mark.usefixtures("on_cpu")
def test_bench_paged_decode_rows_make_its_table(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = bench_paged_decode
    monkeypatch.setattr(bench, "gpu_ms", bench_sdpa.gpu_ms)
    monkeypatch.setattr(bench, "host_us", bench_sdpa.gpu_ms)
    problem = bench.problem
    monkeypatch.setattr(bench, "problem", lambda shape: problem(shape, "cpu"))
    monkeypatch.setattr(
        bench,
        "SHAPES",
        (
            *(bench.Shape(2, 4, 2, 16, which) for which in ("100", "mixed", "falling")),
            bench.Shape(2, 4, 2, 16, "100", queries=4),
        ),
    )
    monkeypatch.setattr(bench, "TOKENS_TO_APPEND", 128)
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    randperm = torch.randperm
    monkeypatch.setattr(torch, "randperm", lambda n, **_: randperm(n))
    rows = Rows(ENV)
    bench.run(rows, rounds=1)
    header, *lines = tables.paged_decode(rows.rows)
    assert header[2:-2] == ["cudnn_ops TB/s", "torch_flash TB/s", "copy TB/s"]
    assert [line[0] for line in lines] == [
        "2, 4, 2, 16 100",
        "2, 4, 2, 16 mixed",
        "2, 4, 2, 16 falling",
        "2, 4, 2, 16 100 4 queries",
        "append 128, 8, 128",
    ]
    assert [line[1] for line in lines] == ["2.00"] * 5
    assert [line[-2:] for line in lines] == [["1.00", "2.00"]] * 5
    assert lines[1][3] == ""
    found = harness.pivot(rows.rows, "tb_per_s")["2,4,2,16 100"]["cudnn_ops"]
    assert found == pytest.approx(2 * 2 * 100 * 2 * 16 * 2 / 2e-3 / 1e12)
    # Wrong results are not timed.
    contiguous = bench.contiguous
    monkeypatch.setattr(bench, "contiguous", lambda p: [2 * t for t in contiguous(p)])
    with pytest.raises(RuntimeError, match="torch_flash differs by"):
        bench.measure(bench.SHAPES[0], rows, 1)


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
    ]
    cases = harness.pivot(rows.rows, "gpu_ms")
    impls = ["cudnn_ops", "eager", "three_pass", "cudnn_ops_new"]
    assert list(cases["rms wide 2,64 bwd"]) == impls
    assert list(cases["swiglu 3,8 bwd"])[-3:] == ["compile", "copy", "cudnn_ops_new"]
    header, *lines = tables.host_overhead(rows.rows)
    assert header == ["", "cudnn_ops", "eager"]
    functions = ("rms_norm", "layer_norm", "swiglu")
    assert lines == [
        [f"{function} 3,8, {which}", "2.00", "2.00"]
        for which in ("no grad", "grad")
        for function in functions
    ]


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
    monkeypatch.setattr(bench, "GEOMETRIES", bench.GEOMETRIES[:0])
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


def test_other_logits_are_not_timed() -> None:
    calls = {"eager": lambda: torch.ones(4), "cudnn_ops": lambda: torch.full((4,), 1.2)}
    with pytest.raises(RuntimeError, match=r"inference: cudnn_ops is 0\.2 of the norm off"):
        bench_resnet.verify("inference", calls)


def test_resnet_table() -> None:
    rows = Rows(ENV)
    rows.add("inference", "cudnn_ops", "step_ms", 1.0)
    rows.add("inference", "eager", "step_ms", 1.5)
    assert tables.resnet(rows.rows) == [
        ["", "cudnn_ops", "eager", "vs eager"],
        ["inference", "1.00", "1.50", "1.50x"],
    ]


@pytest.mark.usefixtures("on_cpu")
def test_bench_host_overhead_rows_make_its_table() -> None:
    rows = Rows(ENV)
    bench_host_overhead.run(rows, rounds=1)
    passes = ("forward, no grad", "forward, grad", "forward + backward")
    cases = [f"{layout} {which}" for layout in ("BSHD", "BHSD") for which in passes]
    assert tables.host_overhead(rows.rows) == [
        ["", "cudnn_ops", "cudnn_ops_function", "torch_cudnn", "torch_flash"],
        *([case, *["2.00"] * 4] for case in cases),
    ]


@pytest.mark.usefixtures("on_cpu")
def test_bench_shape_churn_rows_make_its_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "empty", lambda *a, **k: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(bench_shape_churn, "LONGEST", 20)
    rows = Rows(ENV)
    bench_shape_churn.run(rows, rounds=1)
    plans, lengths = pivot_keys(rows, "plans_built"), pivot_keys(rows, "new_shape_ms")
    assert plans == ["40 lengths, sdpa", "40 lengths, sdpa_backward"]
    assert lengths == [
        "40 lengths, median",
        "40 lengths, 99th percentile",
    ]
    table = tables.new_lengths(rows.rows)
    assert table[0] == ["", "cudnn_ops", "torch_cudnn"]
    assert table[1] == ["plans built, 40 lengths, sdpa", "0", ""]
    assert [line[0] for line in table[3:]] == [f"host ms added, {case}" for case in lengths]
    shape = "2, 4, 2, 48, 16 causal"
    assert tables.polymorphic(rows.rows) == [
        [
            "B, Hq, Hkv, S, D",
            "exact",
            "polymorphic",
            "promoted",
            "polymorphic / exact",
            "promoted / exact",
        ],
        *(
            [f"{shape} {which}", "2.00", "2.00", "2.00", "1.000", "1.000"]
            for which in ("fwd, inference", "fwd", "bwd")
        ),
    ]


def pivot_keys(rows: Rows, metric: str) -> list[str]:
    return list(harness.pivot(rows.rows, metric))


def test_bench_cold_start_rows_make_its_table(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def child(name: str, store: str) -> list[float]:
        calls.append((name, bool(store)))
        return [100.0, 20.0 if store else 90.0, 1.0]

    monkeypatch.setattr(bench_cold_start, "child", child)
    rows = Rows(ENV)
    bench_cold_start.run(rows, rounds=1)
    assert calls[0] == ("cudnn_ops", True)
    assert calls.count(("torch_cudnn", False)) == calls.count(("cudnn_ops", False)) == 2
    table = tables.cold_start(rows.rows)
    assert table[0] == ["", "cudnn_ops", "torch_cudnn"]
    assert table[1] == ["4,32,8,2048,128 causal, warm store", "20.0", ""]
    assert table[4] == ["4,32,8,2048,128 causal, no store", "90.0", "90.0"]


def test_bench_cold_start_tells_why_a_process_failed() -> None:
    with pytest.raises(RuntimeError, match="nobody"):
        bench_cold_start.child("nobody", "")


def test_soak_shapes_are_distinct() -> None:
    shapes = list(bench_soak.shapes(bench_soak.SHAPES))
    assert len(set(shapes)) == len(shapes) == bench_soak.SHAPES
    assert len({shape[1:3] + shape[4:] for shape in shapes}) > 4 * bench_soak.CACHE_LIMIT


@pytest.mark.usefixtures("on_cpu")
def test_bench_soak_rows_make_its_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (3 << 20, 5 << 20))
    monkeypatch.setattr(bench_soak, "shapes", lambda total: [(1, 2, 1, 8, 16, True)] * total)
    rows = Rows(ENV)
    bench_soak.run(rows, rounds=1)
    table = tables.soak(rows.rows)
    assert table[0] == ["", "device MiB", "host MiB"]
    assert [line[:2] for line in table[1:]] == [
        [f"after {count} shapes", "2"] for count in range(50, 501, 50)
    ]
    assert int(table[1][2]) > 50


@pytest.mark.usefixtures("on_cpu")
def test_host_overhead_tensors_have_the_layout_they_are_named_for() -> None:
    for layout, strides in (("BSHD", (64, 512)), ("BHSD", (64 * 64, 64))):
        tensor = bench_host_overhead.tensor(layout)
        assert tensor.shape == (1, 8, 64, 64)
        assert tensor.stride()[1:] == (*strides, 1)


def test_training_step_leaves_the_gradients_of_one_call() -> None:
    leaf = torch.ones(3, requires_grad=True)
    for _ in range(2):
        bench_host_overhead.training_step(lambda: leaf * 2, [leaf], torch.ones(3))
    torch.testing.assert_close(leaf.grad, torch.full((3,), 2.0))


def test_results_folder_is_named_after_the_gpu() -> None:
    slugs = {
        "NVIDIA H200": "h200",
        "NVIDIA H100 80GB HBM3": "h100",
        "NVIDIA A100-SXM4-80GB": "a100",
        "NVIDIA GeForce RTX 4090": "rtx_4090",
        "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": "rtx_pro_6000",
    }
    assert {name: gpu_suite.gpu_slug(name) for name in slugs} == slugs


TESTS_OF_EVERY_KIND = """
import pytest
@pytest.fixture
def broken(): raise OSError
@pytest.mark.parametrize("n", range(3))
def test_good(n): pass
def test_bad(): assert False
def test_skipped(): pytest.skip("no reason")
@pytest.mark.xfail
def test_known(): assert False
def test_broken(broken): pass
"""


def test_junit_report_is_counted(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS_OF_EVERY_KIND)
    command = [sys.executable, "-m", "pytest", "-q", "--junit-xml=junit.xml", "test_some.py"]
    subprocess.run(command, cwd=tmp_path, check=False, capture_output=True)
    failures = ["test_some::test_bad", "test_some::test_broken"]
    expected = gpu_suite.Outcome(passed=3, failed=1, skipped=2, errors=1, failures=failures)
    assert gpu_suite.parse_junit(tmp_path / "junit.xml") == expected


def test_a_crash_of_pytest_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_suite, "run", lambda *_: (-11, 1.0))
    outcome, _ = gpu_suite.run_tests([])
    assert outcome == gpu_suite.Outcome(errors=1, failures=["pytest: exit status -11"])


def test_tests_are_spread_over_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def run(arguments: list[str], _: float) -> tuple[int, float]:
        asked[:] = arguments
        return 0, 1.0

    monkeypatch.setattr(gpu_suite, "run", run)
    gpu_suite.run_tests(["-k", "one"], jobs=3)
    assert asked[asked.index("-n") + 1] == "3"
    assert asked[-3:] == ["tests", "-k", "one"]
    gpu_suite.run_tests([])
    assert "-n" not in asked


def test_a_process_is_stopped_at_its_limit() -> None:
    assert gpu_suite.run(["-c", "raise SystemExit(3)"], limit_s=60)[0] == 3
    sleep = ["-c", "import time; time.sleep(60)"]
    assert gpu_suite.run(sleep, limit_s=0.2)[0] == gpu_suite.TIMED_OUT


ALL = ["gpu_tests", "one", "two"]
GOOD = gpu_suite.Outcome(passed=2, skipped=1)
EMPTY = gpu_suite.Outcome(skipped=3)
BAD = gpu_suite.Outcome(passed=2, errors=1, failures=["a::b"])


@pytest.mark.parametrize(
    ("options", "outcome", "status", "expected"),
    [
        ([], GOOD, 0, (0, ALL)),
        ([], EMPTY, 0, (1, ALL)),
        ([], BAD, 0, (1, ALL)),
        ([], GOOD, 9, (1, ALL)),
        (["--only=tests"], GOOD, 9, (0, ["gpu_tests"])),
        (["--only=benchmarks"], BAD, 0, (0, ["one", "two"])),
    ],
)
def test_suite_runs_what_is_asked_and_fails_with_any_of_it(
    options: list[str],
    outcome: gpu_suite.Outcome,
    status: int,
    expected: tuple[int, list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run(arguments: list[str], _: float) -> tuple[int, float]:
        assert arguments[:2] == ["-m", f"benchmarks.bench_{Path(arguments[3]).stem}"]
        Path(arguments[3]).touch()
        return status, 1.0

    for name in ("bench_one.py", "bench_two.py", "harness.py"):
        (tmp_path / name).touch()
    monkeypatch.setattr(gpu_suite, "BENCHMARKS", tmp_path)
    monkeypatch.setattr(gpu_suite, "run", run)
    monkeypatch.setattr(gpu_suite, "run_tests", lambda *_: (outcome, 1.23))
    monkeypatch.setattr(gpu_suite, "environment", lambda: ENV)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(sys, "argv", ["gpu_suite", *options])
    exit_status = gpu_suite.main()
    written = sorted((tmp_path / "results" / "h200").iterdir())
    assert (exit_status, [path.stem for path in written]) == expected
    if "gpu_tests" in expected[1]:
        where = {key: ENV[key] for key in ("commit", "gpu", "torch", "cudnn")}
        assert json.loads(written[0].read_text()) == vars(outcome) | where | {"seconds": 1.2}


@pytest.fixture
def readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A README with one stale table, and the results for it."""
    rows = Rows(ENV)
    for impl, us in (("cudnn_ops", 10.2), ("torch_cudnn", 12.1)):
        rows.add("BSHD forward, no grad", impl, "host_us", us)
    rows.write(tmp_path / "h200" / "host_overhead.json")
    path = tmp_path / "README.md"
    table = "<!-- table:host_overhead -->\nold\n<!-- /table:host_overhead -->"
    path.write_text(f"above\n{table}\nbelow\n")
    monkeypatch.setattr(tables, "README", path)
    monkeypatch.setattr(tables, "DOCS", tmp_path / "docs")
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    return path


def test_readme_tables_are_checked_and_rewritten(
    readme: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def main(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["tables", *arguments])
        return tables.main()

    stale = readme.read_text()
    assert main("--check") == 1
    assert readme.read_text() == stale
    assert main() == 0
    assert readme.read_text().splitlines() == [
        "above",
        "<!-- table:host_overhead -->",
        "|  | cudnn_ops | torch_cudnn |",
        "| --- | ---: | ---: |",
        "| BSHD forward, no grad | 10.2 | 12.1 |",
        "",
        "Host time of one call in µs, [1, 8, 64, 64] bf16, causal. Median of 50 samples. "
        "NVIDIA H200, commit 0123456789ab-dirty, 2026-11-21, torch 2.11.0, cuDNN 9.19.0.",
        "<!-- /table:host_overhead -->",
        "below",
    ]
    assert main("--check") == 0


def test_an_unmeasured_table_says_so(tmp_path: Path) -> None:
    text = "<!-- table:sdpa -->\n{}<!-- /table:sdpa -->"
    assert tables.render(text.format(""), tmp_path) == text.format("Not measured yet.\n")


def test_wrong_markers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no table is named 'spda'"):
        tables.render("<!-- table:spda -->\n<!-- /table:spda -->", tmp_path)
    with pytest.raises(SystemExit, match="no closing marker"):
        tables.render("<!-- table:sdpa -->\n", tmp_path)
