"""explain, the descriptions of GPUs, the command line, collect_env."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from importlib import resources

import pytest
import torch

import cudnn_ops
from cudnn_ops import __main__ as command_line
from cudnn_ops import collect_env, support
from cudnn_ops.support import explain

SHAPE = (2, 8, 128, 64)
SPEC = (SHAPE, torch.bfloat16)


def test_an_answer_says_everything():
    answer = explain("sdpa", SPEC, device="h200")
    assert answer.supported
    assert answer.reason == ""
    assert answer.device == "NVIDIA H200"
    assert answer.cudnn_version.startswith("9.")
    assert "supported" in str(answer)
    assert answer.engine in str(answer)


def test_a_refusal_has_cudnns_reason():
    answer = explain("sdpa_backward", ((2, 8, 128, 512), torch.bfloat16), device="h200")
    assert not answer.supported
    assert "hidden_dim" in answer.reason
    assert "\n" not in answer.reason
    assert answer.engine == ""
    assert answer.reason in str(answer)


def test_what_no_gpu_takes():
    answer = explain("sdpa", ((2, 8, 128, 64), torch.float32), device="b200")
    assert not answer.supported
    assert "float16 and bfloat16" in answer.reason


@pytest.mark.parametrize("op", ["sdpa", "sdpa_backward"])
def test_a_head_size_that_is_padded(op):
    answer = explain(op, ((8, 128, 77), torch.bfloat16), device="b200")
    assert answer.supported, answer.reason


def test_a_gpu_that_is_too_old(tmp_path):
    """The description of an H200 that says it is a V100."""
    description = json.loads(
        (resources.files("cudnn_ops.support") / "devices/h200.json").read_text()
    )
    description |= {"deviceVer": 700, "deviceName": "an old one"}
    path = tmp_path / "old.json"
    path.write_text(json.dumps(description))
    answer = explain("sdpa", SPEC, device=path)
    assert not answer.supported
    assert "SM80" in answer.reason
    assert answer.device == "an old one"


def test_strides_and_tensors_are_taken_as_they_are():
    """All three ways to say the same tensor give the same plan, which is built once."""
    tensor = torch.empty(2, 128, 8, 64, dtype=torch.bfloat16).transpose(1, 2)
    cudnn_ops.cache_clear()
    first = explain("sdpa", tensor, device="h200")
    second = explain("sdpa", (tensor.shape, tensor.dtype, tensor.stride()), device="h200")
    assert first == second
    assert cudnn_ops.cache_info().builds == 1
    explain("sdpa", SPEC, device="h200")  # contiguous: another layout, another plan
    assert cudnn_ops.cache_info().builds == 2


def test_memory_that_cudnn_cannot_address_is_copied_as_the_kernel_does():
    odd = ((2, 8, 128, 64), torch.bfloat16, (8 * 128 * 65, 128 * 65, 65, 1))
    shared = ((2, 8, 128, 64), torch.bfloat16, (128 * 64, 0, 64, 1))
    strided = ((2, 8, 128, 64), torch.bfloat16, (8 * 128 * 128, 128 * 128, 128, 2))
    for spec in (odd, shared, strided):
        assert explain("sdpa", spec, device="h200").supported


@pytest.mark.parametrize("name", support.devices())
def test_every_description_serves(name):
    answer = explain("sdpa", SPEC, device=name)
    assert answer.supported
    # In any case, and as the GPU itself calls it.
    for other in (name.upper(), name.replace("_", " "), name.replace("_", "-").title()):
        assert explain("sdpa", SPEC, device=other) == answer
    assert explain("sdpa", SPEC, device=f"NVIDIA {name}") == answer


def test_every_operator_can_be_asked_about():
    """Each public operator that has a plan of cuDNN, and its backward."""
    named = {op.removesuffix("_backward") for op in support.OPERATORS}
    assert named - {"sdpa"} <= set(cudnn_ops.__all__)
    assert {op for op in cudnn_ops.__all__ if "norm" in op or op.startswith("conv")} - named == {
        "tune_norms",
        # By kernels of our own alone.
        *("group_norm", "add_group_norm", "instance_norm"),
        *("adaptive_layer_norm", "gate_add_adaptive_layer_norm"),
        *("adaptive_rms_norm", "gate_add_adaptive_rms_norm"),
        *("rms_norm_fp8", "add_rms_norm_fp8"),
    }
    assert {
        "sdpa",
        "varlen_attention",
        "varlen_attention_fp8",
        "paged_attention",
        "linear",
        "mlp",
    } <= named


@pytest.mark.parametrize(("device", "is_packed"), [("h200", True), ("b300", True), ("l4", False)])
def test_packed_attention_has_its_own_plans(device, is_packed):
    """In training the log-sum-exp is packed, where cuDNN's backward reads it so."""
    q = ((3000, 4, 64), torch.bfloat16)
    options = {"cu_seqlens_q": 5, "max_seqlen_q": 700, "causal": True, "device": device}
    with cudnn_ops.record_shapes() as requests:
        assert explain("varlen_attention", q, **options).supported
        assert explain("varlen_attention", q, **options, with_lse=True).supported
        assert explain("varlen_attention_backward", q, **options).supported
    inference, *training = map(str, requests)
    stride = 4096 if is_packed else 0
    assert "lse_stride=0" in inference
    assert all(f"lse_stride={stride}" in plan for plan in training)
    assert all("[6, 4, 1024, 64]" in plan for plan in (inference, *training))


def test_queries_and_keys_that_are_the_same_tokens_are_aligned_at_both_ends():
    q = ((3000, 4, 64), torch.bfloat16)
    offsets = ((6,), torch.int32)
    plans = [
        cudnn_ops.plan_requests(
            "varlen_attention", q, causal=True, cu_seqlens_q=offsets, training=False, **others
        )
        for others in ({}, {"cu_seqlens_k": offsets}, {"cu_seqlens_k": ((6,), torch.int32)})
    ]
    assert ["bottom_right=1" in str(one) for (one,) in plans] == [False, False, True]


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"op": "conv9d"}, "op must be one of sdpa, sdpa_backward"),
        ({"device": "h2000"}, r"not one of a100, .* and not a file"),
        ({"q": (SHAPE,)}, r"q must be a tensor, \(shape, dtype\)"),
        ({"q": SHAPE}, "q must be a tensor"),
        ({"q": ((64,), torch.bfloat16)}, "query must have at least 2 dimensions"),
        ({"k": ((2, 3, 128, 64), torch.bfloat16)}, "must be a multiple"),
        ({"v": ((2, 8, 64, 64), torch.bfloat16)}, "key has length 128 and value 64"),
    ],
)
def test_mistakes(kwargs, message):
    with pytest.raises(ValueError, match=message):
        explain(**({"op": "sdpa", "q": SPEC, "device": "h200"} | kwargs))


#: Every argument of every operator's function, as a call has it.
CALLS = {
    "sdpa": {
        **dict.fromkeys(("query", "key", "value"), SPEC),
        "attn_mask": ((128, 128), torch.bfloat16),
        "dropout_p": 0.0,
        "is_causal": True,
        "scale": 0.5,
        "enable_gqa": True,
        "window_size": (64, 0),
        "bottom_right": True,
        "softcap": 3.0,
        "alibi_slopes": None,
        "sinks": torch.zeros(8),
        "seq_lens_q": torch.full((2,), 5),
        "seq_lens_kv": ((2,), torch.int32),
        "deterministic": False,
        "rng_state": torch.zeros(2, dtype=torch.int64),
    },
    "paged_attention": {
        "query": ((2, 1, 8, 64), torch.bfloat16),
        **dict.fromkeys(("key_cache", "value_cache"), ((100, 8, 16, 64), torch.bfloat16)),
        "page_table": torch.zeros(2, 32, dtype=torch.int32),
        "seq_lens_kv": torch.zeros(2, dtype=torch.int32),
        "cu_seqlens_q": None,
        "max_seqlen_q": 0,
        "scale": 0.5,
        "is_causal": False,
        "window_size": (64, 0),
        "bottom_right": True,
        "softcap": 0.0,
        "sinks": ((8,), torch.float32),
        "kv_layout": "HND",
        "out": torch.zeros(2, 1, 8, 64, dtype=torch.bfloat16),
    },
    "varlen_attention": {
        **dict.fromkeys(("q", "k", "v"), ((500, 8, 64), torch.bfloat16)),
        "cu_seqlens_q": torch.zeros(4, dtype=torch.int32),
        "cu_seqlens_k": ((4,), torch.int32),
        "max_seqlen_q": 200,
        "max_seqlen_k": 300,
        "dropout_p": 0.0,
        "softmax_scale": 0.5,
        "causal": True,
        "window_size": (64, 0),
        "softcap": 3.0,
        "alibi_slopes": None,
        "sinks": True,
        "seqused_q": torch.zeros(3, dtype=torch.int32),
        "seqused_k": True,
        "bottom_right": True,
        "deterministic": None,
        "rng_state": torch.zeros(2, dtype=torch.int64),
    },
    "add_layer_norm": {
        **dict.fromkeys(("input", "residual"), ((64, 512), torch.bfloat16)),
        "normalized_shape": (512,),
        "weight": True,
        "bias": True,
        "eps": 1e-3,
        "zero_centered": True,
    },
    "layer_norm": {
        "input": ((64, 512), torch.bfloat16),
        "normalized_shape": (512,),
        "weight": torch.ones(512),
        "bias": ((512,), torch.float32),
        "eps": 1e-3,
        "zero_centered": False,
    },
    "conv2d": {
        "input": ((4, 64, 14, 14), torch.bfloat16),
        "weight": ((32, 64, 3, 3), torch.bfloat16),
        "bias": ((32,), torch.bfloat16),
        "stride": 2,
        "padding": (1, 1),
        "dilation": 1,
        "groups": 1,
        "activation": "relu",
        "residual": torch.zeros(4, 32, 7, 7, dtype=torch.bfloat16),
    },
    "conv_transpose2d": {
        "input": ((4, 64, 7, 7), torch.bfloat16),
        "weight": ((64, 32, 3, 3), torch.bfloat16),
        "bias": ((32,), torch.bfloat16),
        "stride": 2,
        "padding": (1, 1),
        "output_padding": 1,
        "groups": 1,
        "dilation": 1,
        "activation": "relu",
        "residual": torch.zeros(4, 32, 14, 14, dtype=torch.bfloat16),
    },
}


@pytest.mark.parametrize("op", CALLS)
def test_every_argument_of_a_call_is_taken(op):
    function = {"sdpa": cudnn_ops.scaled_dot_product_attention}.get(op) or getattr(cudnn_ops, op)
    parameters = inspect.signature(function).parameters
    defaults = {name: one.default for name, one in parameters.items() if name not in CALLS[op]}
    assert explain(op, **CALLS[op], **defaults, device="h200").supported


@pytest.mark.parametrize(
    ("op", "function", "shapes"),
    [
        ("sdpa_backward", cudnn_ops.scaled_dot_product_attention, [SHAPE]),
        ("rms_norm", cudnn_ops.rms_norm, [(64, 512)]),
        ("conv1d_backward", cudnn_ops.conv1d, [(4, 64, 14), (32, 64, 3)]),
        ("conv3d", cudnn_ops.conv3d, [(4, 64, 3, 9, 9), (32, 64, 3, 3, 3)]),
        ("conv_transpose2d", cudnn_ops.conv_transpose2d, [(4, 64, 9, 9), (64, 32, 3, 3)]),
    ],
)
def test_defaults_are_taken_where_a_call_has_them(op, function, shapes):
    parameters = inspect.signature(function).parameters.items()
    defaults = {name: one.default for name, one in parameters if one.default is not one.empty}
    specs = [(shape, torch.bfloat16) for shape in shapes]
    assert explain(op, *specs, **defaults, device="h200").supported


def test_arguments_without_effect_change_no_plan():
    plain = support.plan_key("sdpa", SPEC, None, None, with_lse=False, polymorphic=False)
    other = support.plan_key(
        "sdpa", SPEC, None, None, with_lse=False, polymorphic=False, scale=0.3, enable_gqa=True
    )
    assert plain == other


@pytest.mark.parametrize(
    ("op", "options", "message"),
    [
        (
            "sdpa",
            {"causal": True},
            r"sdpa has no argument causal; did you mean is_causal\? It accepts ",
        ),
        ("sdpa_backward", {"attn_bias": None}, "did you mean attn_mask"),
        ("sdpa", {"zzz": 1}, r"no argument zzz\. It accepts attn_mask, dropout_p, .*grad_mask"),
        ("paged_attention", {"k": SPEC, "page_tables": 1}, "did you mean page_table"),
        ("layer_norm", {"epsilon": 1}, "did you mean eps"),
        ("rms_norm", {"bias": True}, "rms_norm has no argument bias"),
        (
            "conv2d",
            {"k": SPEC, "strides": 1},
            r"conv2d has no argument strides; did you mean stride",
        ),
        ("sdpa", {"query": SPEC}, "sdpa got query twice: it is q"),
    ],
)
def test_an_argument_that_there_is_not(op, options, message):
    with pytest.raises(TypeError, match=message):
        explain(op, SPEC, device="h200", **options)


def test_mistakes_in_what_is_taken():
    with pytest.raises(ValueError, match=r"sinks must be a tensor, \(shape, dtype\)"):
        explain("sdpa", SPEC, sinks=(8,), device="h200")
    with pytest.raises(ValueError, match="sinks must hold one floating-point number"):
        explain("sdpa", SPEC, sinks=((9,), torch.float32), device="h200")
    with pytest.raises(ValueError, match="activation must be one of none, relu"):
        explain("conv2d", SPEC, ((8, 8, 3, 3), torch.bfloat16), activation="tanh", device="h200")
    residual = ((1, 2, 3, 4), torch.bfloat16)
    with pytest.raises(ValueError, match="residual"):
        explain("conv2d", SPEC, ((8, 8, 3, 3), torch.bfloat16), residual=residual, device="h200")
    with pytest.raises(ValueError, match="cu_seqlens_q is missing"):
        explain("varlen_attention", SPEC, device="h200")
    with pytest.raises(ValueError, match="page_table is missing"):
        explain("paged_attention", SPEC, SPEC, device="h200")
    with pytest.raises(ValueError, match="conv2d needs k, the weight"):
        explain("conv2d", SPEC, device="h200")
    with pytest.raises(TypeError, match="paged_attention needs q, the query"):
        explain("paged_attention", device="h200")


def test_a_description_that_is_none(tmp_path):
    path = tmp_path / "broken.json"
    for text in ("", "{}", "not json", '{"deviceVer": "old"}'):
        path.write_text(text)
        with pytest.raises(ValueError, match="not the description of a GPU"):
            explain("sdpa", SPEC, device=path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_for_current():
    with pytest.raises(RuntimeError, match="torch sees none; describe one"):
        explain("sdpa", SPEC, device="current")
    with pytest.raises(RuntimeError, match="torch sees none"):
        support.describe_device()


def test_the_stub_leaves_torch_alone():
    explain("sdpa", SPEC, device="a100")
    assert torch.cuda.is_available() == (torch.cuda.device_count() > 0)


@pytest.mark.gpu
def test_the_live_gpu_answers_as_its_description_does(tmp_path):
    live = explain("sdpa", SPEC, device="current")
    path = tmp_path / "here.json"
    path.write_text(support.describe_device())
    described = explain("sdpa", SPEC, device=path)
    assert live.supported
    assert (live.engine, live.workspace_bytes) == (described.engine, described.workspace_bytes)
    assert live.device == described.device == torch.cuda.get_device_name()


def test_the_command_line(capsys):
    assert command_line.main(["explain", "sdpa", "--device", "h200", "--causal"]) == 0
    assert "supported" in capsys.readouterr().out
    polymorphic = ["explain", "sdpa", "--device", "h200", "--polymorphic"]
    assert command_line.main(polymorphic) == 0
    refused = ["explain", "sdpa_backward", "--device", "a100", "-q", "1,2,64,256"]
    assert command_line.main(refused) == 1
    assert "reason: " in capsys.readouterr().out
    features = ["--device", "h200", "--window", "64", "0", "--softcap", "30", "--sinks"]
    assert command_line.main(["explain", "sdpa_backward", *features]) == 0
    mask = ["--device", "h200", "--mask", "1,32,2048,2048", "--grad-mask"]
    assert command_line.main(["explain", "sdpa_backward", *mask]) == 0
    capsys.readouterr()
    assert command_line.main(["explain", "sdpa_backward", *mask, "--softcap", "3"]) == 1
    assert "known to compute a gradient of attn_mask" in capsys.readouterr().out
    assert command_line.main(["explain", "sdpa", "--device", "h200", "--window", "-3", "0"]) == 2
    assert "window_size must be (left, right)" in capsys.readouterr().err
    assert command_line.main(["explain", "sdpa", "--device", "nothing"]) == 2
    assert "not a file" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command_line.main(["explain", "sdpa", "-q", "1,2,3"])
    assert "batch,heads,length,head_size" in capsys.readouterr().err


def test_version_names_what_computes(capsys):
    with pytest.raises(SystemExit) as stop:
        command_line.main(["--version"])
    assert stop.value.code == 0
    lines = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert lines["cudnn_ops"] == cudnn_ops.__version__
    assert lines["torch"] == torch.__version__
    assert {"cuDNN loaded", "built against cuDNN Frontend"} <= lines.keys()


def test_collect_env():
    done = subprocess.run(
        [sys.executable, "-m", "cudnn_ops.collect_env"], capture_output=True, text=True, check=True
    )
    for name in (
        "torch",
        "GPU",
        "cuDNN loaded",
        "libcudnn mapped",
        "NVRTC",
        "plan policy",
        "plan store",
    ):
        assert f"{name}:" in done.stdout
    assert collect_env.collect_env()["torch"] == torch.__version__


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["explain", "sdpa", "-q", f"1,2,3,{2**70}"], "is not batch,heads,length,head_size"),
        (["explain", "conv9d"], "invalid choice: 'conv9d'"),
        (["explain", "sdpa", "--device", "{binary}"], "is not the description of a GPU"),
        (["explain", "sdpa", "--device", "{folder}"], "and not a file"),
        (["tune", "norms", "--workers", "0"], "'0' is not a number from 1 on"),
        (["tune", "sdpa", "--mask"], "unrecognized arguments: --mask"),
    ],
)
def test_bad_arguments_end_with_a_line(arguments, message, tmp_path, capsys):
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    places = {"binary": tmp_path / "binary", "folder": tmp_path}
    try:
        status = command_line.main([argument.format(**places) for argument in arguments])
    except SystemExit as exit:  # argparse's
        status = exit.code
    assert status == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.gpu
def test_bad_arguments_are_told_before_anything_is_measured(tmp_path, capsys):
    (tmp_path / "empty.json").write_text("{}")
    for arguments, message in (
        (["describe-device", "99"], "counted from 0, got 99"),
        (["tune", "sdpa", "--table", str(tmp_path / "no" / "x.json")], "is not a folder"),
        (["tune", "sdpa", "--table", str(tmp_path / "empty.json")], "is not a table of engines"),
    ):
        assert command_line.main(arguments) == 2
        assert message in capsys.readouterr().err
