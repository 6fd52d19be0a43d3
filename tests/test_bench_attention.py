"""Benchmarks of attention and of its plans, run on a CPU: their rows, checks and tables."""

import sys
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import cudnn_ops
from benchmarks import (
    bench_attention_features,
    bench_bundle,
    bench_cold_start,
    bench_fp8,
    bench_fp8_prefill,
    bench_host_overhead,
    bench_paged_decode,
    bench_sdpa,
    bench_shape_churn,
    bench_soak,
    harness,
    tables,
)
from benchmarks.harness import Rows
from cudnn_ops import support
from cudnn_ops.plans import common
from tests.cases.benchmarks import ENV, SHAPE
from tests.cases.benchmarks import on_cpu as on_cpu


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
    names = ("cudnn_ops", "kernel", "cudnn", "float8", "torch_flash", "copy")
    assert header[2:-2] == [f"{name} TB/s" for name in names]
    assert [line[0] for line in lines] == [
        "2, 4, 2, 16 100",
        "2, 4, 2, 16 mixed",
        "2, 4, 2, 16 falling",
        "2, 4, 2, 16 100 4 queries",
        "append 128, 8, 128",
    ]
    assert [line[1] for line in lines] == ["2.00"] * 5
    assert [line[-2:] for line in lines] == [["1.00", "2.00"]] * 5
    assert lines[1][6] == ""
    found = harness.pivot(rows.rows, "tb_per_s")["2,4,2,16 100"]
    assert found["cudnn_ops"] == pytest.approx(2 * 2 * 100 * 2 * 16 * 2 / 2e-3 / 1e12)
    assert found["float8"] == pytest.approx(found["kernel"] / 2)
    assert harness.pivot(rows.rows, "gpu_ms")["plan 2"] == {"cudnn_ops": 2.0}
    # Wrong results are not timed.
    contiguous = bench.contiguous
    monkeypatch.setattr(bench, "contiguous", lambda p: [2 * t for t in contiguous(p)])
    with pytest.raises(RuntimeError, match="torch_flash differs by"):
        bench.measure(bench.SHAPES[0], rows, 1)


@pytest.mark.usefixtures("on_cpu")
def test_bench_host_overhead_rows_make_its_table() -> None:
    rows = Rows(ENV)
    bench_host_overhead.run(rows, rounds=1)
    passes = ("forward, no grad", "forward, grad", "forward + backward")
    cases = [f"{layout} {which}" for layout in ("BSHD", "BHSD") for which in passes]
    assert tables.host_overhead(rows.rows) == [
        ["", "cudnn_ops", "cudnn_ops_function", "torch_cudnn", "torch_flash", "polymorphic"],
        *([case, *["2.00"] * 5] for case in cases),
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

    def child(name: str, store: str, packaged: str = "none") -> list[float]:
        has_plans = packaged != "none"
        calls.append((name, bool(store), has_plans))
        return [100.0, 20.0 if store or has_plans else 90.0, 1.0, 0.0, 0.0 if has_plans else 2.0]

    monkeypatch.setattr(bench_cold_start, "child", child)
    monkeypatch.setattr(bench_cold_start, "build_packaged", lambda folder: None)
    rows = Rows(ENV)
    bench_cold_start.run(rows, rounds=1)
    assert calls[0] == ("cudnn_ops", True, False)
    for name, has_plans in (("torch_cudnn", False), ("cudnn_ops", False), ("cudnn_ops", True)):
        assert calls.count((name, False, has_plans)) == 2
    built = harness.pivot(rows.rows, "plans_built")
    assert built == {f"{bench_cold_start.CASE}, no store, plans of the package": {"cudnn_ops": 0}}
    table = tables.cold_start(rows.rows)
    assert table[0] == ["", "cudnn_ops", "torch_cudnn"]
    assert table[1] == ["4,32,8,2048,128 causal, warm store", "20.0", ""]
    assert table[4] == ["4,32,8,2048,128 causal, no store", "90.0", "90.0"]
    assert table[7] == ["4,32,8,2048,128 causal, no store, plans of the package", "20.0", ""]


def test_bench_cold_start_asks_for_plans_that_a_wheel_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "describe_device", lambda: support.prepare("h200"))
    written = []
    monkeypatch.setattr(
        cudnn_ops, "build_bundle", lambda *arguments, **_: written.append(arguments)
    )
    plan_requests = common.plan_requests
    monkeypatch.setattr(
        common,
        "plan_requests",
        lambda *arguments, device, **options: plan_requests(*arguments, device="h200", **options),
    )
    bench_cold_start.build_packaged(Path("folder"))
    ((requests, device, path),) = written
    assert (device, path) == ("current", Path("folder/sm90-132-cuda13000.bundle"))
    assert set(requests) <= set(common.common_requests("h200"))


def test_bench_cold_start_tells_why_a_process_failed() -> None:
    with pytest.raises(RuntimeError, match="nobody"):
        bench_cold_start.child("nobody", "")


def test_bench_bundle_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def child(name: str, store: str, *bundles: str) -> list[float]:
        calls.append((name, store, *bundles))
        times = [100.0, 20.0 if bundles else 90.0, 1.0, 3.0 if bundles else 0.0]
        return [*times, 0.0 if bundles else 2.0] if name == "cudnn_ops" else times

    monkeypatch.setattr(bench_bundle, "child", child)
    monkeypatch.setattr(bench_bundle, "build", lambda folder: "plans.bundle")
    rows = Rows(ENV)
    bench_bundle.run(rows, rounds=1)
    assert set(calls) == {
        ("cudnn_ops", "", "plans.bundle"),
        ("cudnn_ops", ""),
        ("torch_default", ""),
    }
    case = bench_bundle.CASE
    assert harness.pivot(rows.rows, "first_call_ms") == {
        f"{case}, a bundle": {"cudnn_ops": 20.0},
        f"{case}, a bundle, loading it": {"cudnn_ops": 3.0},
        f"{case}, no bundle": {"cudnn_ops": 90.0, "eager": 90.0},
    }
    assert harness.pivot(rows.rows, "plans_built") == {
        f"{case}, a bundle": {"cudnn_ops": 0.0},
        f"{case}, no bundle": {"cudnn_ops": 2.0},
    }


def test_bench_bundle_has_the_plans_of_its_case(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    h200 = resources.files("cudnn_ops.support") / "devices/h200.json"
    monkeypatch.setattr(cudnn_ops.support, "describe_device", h200.read_text)
    bundle = cudnn_ops.load_bundle(bench_bundle.build(tmp_path), device="h200")
    cudnn_ops.unload_bundle(bundle.path)
    assert [request.op for request in bundle.requests] == ["sdpa", "sdpa_backward"]
    assert all("bf16[4, 32, 2048, 128]" in str(request) for request in bundle.requests)


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


@pytest.mark.usefixtures("on_cpu")
def test_bench_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SHAPES", "tensors", "gpu_ms"):
        monkeypatch.setattr(bench_fp8, name, getattr(bench_sdpa, name))
    decoded = bench_paged_decode.Shape(2, 4, 2, 64, "100")
    monkeypatch.setattr(bench_fp8, "DECODED", (decoded,))
    problem = bench_paged_decode.problem
    monkeypatch.setattr(bench_paged_decode, "problem", lambda shape: problem(shape, "cpu"))
    monkeypatch.setattr(bench_fp8, "LAYERS", ((32, 64, 96),))
    rows = Rows(ENV)
    bench_fp8.run(rows, rounds=harness.QUICK_ROUNDS)
    times = harness.pivot(rows.rows, "gpu_ms")
    assert list(times[str(SHAPE)]) == ["cudnn_ops", "known scales", "kernel alone", "bf16"]
    assert list(times[f"{SHAPE} turned"]) == ["cudnn_ops", "known scales", "bf16"]
    roundings = (
        *("rounded", "rounded, known scale", "widened"),
        *("turned and rounded", "turned and rounded, known scales", "normed, turned and rounded"),
    )
    layers = [f"32,64,96 {name}" for name in ("norm and MLP", "normed rows", "gated rows")]
    assert list(times[f"{decoded} decoding"]) == ["cudnn_ops", "bf16"]
    assert list(times[f"{SHAPE} trained"]) == ["cudnn_ops", "bf16"]
    assert list(times)[4:] == [*(f"{SHAPE} {name}" for name in roundings), *layers]
    assert list(times[layers[0]]) == ["cudnn_ops", "bf16"]
    assert all(list(times[f"{SHAPE} {name}"]) == ["cudnn_ops", "copy"] for name in roundings)
    of_turned = harness.pivot(rows.rows, "error")[f"{SHAPE} turned"]
    assert of_turned["bf16"] < 0.01 < of_turned["cudnn_ops"] == of_turned["known scales"] < 0.06
    errors = harness.pivot(rows.rows, "error")[str(SHAPE)]
    assert errors["bf16"] < 0.01 < errors["cudnn_ops"] < 0.06
    assert errors["cudnn_ops"] == errors["known scales"] == errors["kernel alone"]
    out = torch.full((2, 4, 48, 16), torch.nan)
    with pytest.raises(RuntimeError, match="broken: the output is nan of its norm off"):
        bench_fp8.verify("broken", SHAPE, out, torch.ones(2, 48, 16))


def test_bench_fp8_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: dict[str, Any] = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
    }
    config = bench_fp8_prefill.LlamaConfig(
        **sizes, hidden_size=64, intermediate_size=96, vocab_size=97, initializer_range=0.2
    )
    monkeypatch.setattr(bench_fp8_prefill, "CONFIG", config)
    monkeypatch.setattr(bench_fp8_prefill, "TOKENS", 40)
    monkeypatch.setattr(
        bench_fp8_prefill,
        "step_ms",
        lambda functions, rounds: {
            name: float(bool(function().isfinite().all())) for name, function in functions.items()
        },
    )
    both = bench_fp8_prefill.variants(bench_fp8_prefill.random_model("cpu"))
    shared = {each.data_ptr() for each in both["bf16"].parameters()}
    assert {each.data_ptr() for each in both["cudnn_ops"].parameters()} == shared
    rows = Rows(ENV)
    bench_fp8_prefill.run(rows, harness.QUICK_ROUNDS, "cpu")
    assert harness.pivot(rows.rows, "step_ms") == {"prefill of 40": {"cudnn_ops": 1.0, "bf16": 1.0}}
    errors = harness.pivot(rows.rows, "error")["prefill of 40"]
    assert 0 < errors["bf16"] < 0.02 < errors["cudnn_ops"] < 0.2
    logits = torch.ones(1, 97)
    for wrong in (logits * torch.nan, logits * 2):
        with pytest.raises(RuntimeError, match="the logits are off by these shares"):
            bench_fp8_prefill.verify({"cudnn_ops": wrong, "bf16": logits * 1.01}, logits)
