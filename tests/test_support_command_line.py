"""``python -m cudnn_ops explain`` for every operator, with that operator's own options."""

from __future__ import annotations

import pytest

from cudnn_ops import _C
from cudnn_ops.__main__ import main
from cudnn_ops.support import OPERATORS

#: For each operator options of its own.
OPTIONS = {
    "sdpa": "--causal --layout bhsd -q 2,4,100,64",
    "sdpa_fp8": "--causal --dtype e5m2 --out-dtype fp16 --padding --lse -q 2,4,100,64",
    "sdpa_fp8_backward": "--causal --padding --grad-out-dtype e5m2 --grad-dtype fp16 -q 2,4,100,64",
    "sdpa_mxfp8": "--causal --bottom-right --dtype e5m2 --out-dtype fp16 -q 2,4,100,64",
    "varlen_attention": "-q 500,8,64 --sequences 3 --max-length 200 --causal --sinks --top-left",
    "varlen_attention_fp8": "-q 500,8,64 --dtype e4m3 --sequences 3 --causal --out-dtype fp16",
    "paged_attention": "--window 64 0 --kv-layout HND --page-table 8,32 -q 8,1,32,128",
    "rms_norm": "--input 64,512 --zero-centered --weight-dtype fp32",
    "layer_norm": "--input 64,512 --bias --dtype fp32",
    "batch_norm": "--input 8,64,9,9 --activation relu --residual --channels-last",
    "conv1d": "--input 4,64,100 --weight 32,64,3 --padding 1",
    "conv2d": "--input 4,64,9,9 --weight 32,16,3,3 --groups 4 --stride 2 1 --activation relu",
    "conv3d": "--input 2,16,5,9,9 --weight 32,16,3,3,3 --residual",
    "conv_transpose1d": "--input 4,64,100 --weight 64,32,4 --stride 2 --padding 1",
    "conv_transpose2d": "--input 4,64,9,9 --weight 64,32,3,3 --stride 2 --output-padding 1 0",
    "conv_transpose3d": "--input 2,16,5,9,9 --weight 16,8,2,2,2 --stride 2 --bias",
    "linear": "--input 64,128 --weight 256,128 --bias --activation gelu --residual",
    "mlp": "--input 64,128 --w1 256,128 --w2 64,256 --bias --activation silu",
}


@pytest.mark.parametrize("op", OPERATORS)
def test_explain(op, capsys):
    forward = op.removeprefix("add_").removesuffix("_backward")
    options = OPTIONS.get(op) or OPTIONS[forward]
    if op in ("sdpa", "varlen_attention", "layer_norm", "batch_norm", "conv2d", "linear"):
        options += " --training"
    # Hopper is refused packed sequences of 8 bits (known_bad.json), and gradients in them.
    on_blackwell = ("varlen_attention_fp8", "sdpa_fp8_backward", "sdpa_mxfp8")
    device = "B200" if op in on_blackwell else "H200"
    is_missing = op == "sdpa_mxfp8" and _C.cudnn_version() < 92100
    assert main(["explain", op, "--device", device, *options.split()]) == is_missing
    assert capsys.readouterr().out.startswith(f"{op} on NVIDIA {device}, cuDNN 9.")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("sdpa -q 1,2,3", "is not batch,heads,length,head_size"),
        ("varlen_attention -q 1,2,3,4", "is not tokens,heads,head_size"),
        ("conv1d --input 1,2,3,4", "is not N,C,W"),
        ("rms_norm --bias", "unrecognized arguments: --bias"),
        ("sdpa_backward --training", "unrecognized arguments: --training"),
    ],
)
def test_another_operator_s_shapes_and_options_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit):
        main(["explain", *arguments.split()])
    assert message in capsys.readouterr().err
