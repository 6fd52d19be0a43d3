"""Requests as JSON: saved ones, shapes written by hand, and what is neither."""

from __future__ import annotations

import json

import pytest
import torch

import cudnn_ops
from cudnn_ops import load_requests, plan_requests, save_requests
from cudnn_ops.support import explain

BF16 = torch.bfloat16
QUERY = ((1, 4, 64, 64), BF16)
KEY = ((1, 2, 64, 64), BF16)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "shapes.json"


@pytest.mark.usefixtures("fresh_cache")
def test_what_was_recorded_comes_back(path):
    with cudnn_ops.record_shapes() as shapes:
        explain("sdpa", QUERY, KEY, device="h200")
        explain("sdpa", QUERY, KEY, device="h200", is_causal=True, with_lse=True)
    save_requests(shapes, path)
    assert load_requests(path) == shapes
    save_requests([], path)
    assert load_requests(path) == []


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        (
            {"op": "sdpa", "q": [[1, 4, 64, 64], "bf16"], "k": [[1, 2, 64, 64], "bf16"]},
            plan_requests("sdpa", QUERY, KEY),
        ),
        (
            {
                "op": "sdpa",
                "q": [[1, 4, 64, 64], "bfloat16", [16384, 64, 256, 1]],
                "is_causal": True,
                "attn_mask": [[1, 1, 64, 64], "bool"],
                "training": False,
                "plans": "exact",
            },
            plan_requests(
                "sdpa",
                ((1, 4, 64, 64), BF16, (16384, 64, 256, 1)),
                is_causal=True,
                attn_mask=((1, 1, 64, 64), torch.bool),
                training=False,
                plans="exact",
            ),
        ),
        (
            {"op": "layer_norm", "q": [[64, 512], "fp16"], "weight": "float32", "bias": True},
            plan_requests(
                "layer_norm", ((64, 512), torch.float16), weight=torch.float32, bias=True
            ),
        ),
        (
            {
                "op": "conv2d",
                "input": [[2, 8, 9, 9], "fp32"],
                "weight": [[8, 8, 3, 3], "fp32"],
                "stride": [2, 1],
                "activation": "relu",
            },
            plan_requests(
                "conv2d",
                ((2, 8, 9, 9), torch.float32),
                ((8, 8, 3, 3), torch.float32),
                stride=(2, 1),
                activation="relu",
            ),
        ),
    ],
    ids=["sdpa", "strides and a mask", "norm", "convolution"],
)
def test_shapes_by_hand(entry, expected, path):
    path.write_text(json.dumps([entry, entry, expected[0].words]))
    assert load_requests(path) == expected


def test_packed_attention_is_requested_for_the_gpu_that_is_named(path):
    entry = {
        "op": "varlen_attention",
        "q": [[300, 4, 64], "bf16"],
        "cu_seqlens_q": 2,
        "max_seqlen_q": 200,
    }
    path.write_text(json.dumps([entry]))
    query = ((300, 4, 64), BF16)
    known = {
        device: plan_requests(
            "varlen_attention", query, cu_seqlens_q=2, max_seqlen_q=200, device=device
        )
        for device in ("a100", "h200")
    }
    assert known["a100"] != known["h200"]
    for device, requests in known.items():
        assert load_requests(path, device=device) == requests


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is not JSON"),
        ("\N{LATIN SMALL LETTER E WITH ACUTE}", "is not JSON"),
        ('"sdpa"', "is not a list of requests or shapes"),
        ('{"graphs": "0123", "requests": []}', r"another version of cudnn_ops \(graphs 0123, here"),
        ("[[1, 2, 3]]", "entry 0: .*no operator of this version has such a plan"),
        ("[[]]", "entry 0: .*no operator of this version"),
        ("[[1, true]]", "entry 0: a request must be a list of integers, or an object"),
        ("[1]", "entry 0: a request must be a list of integers"),
        ("[[99999999999999999999]]", "entry 0: a request's integers must fit in 64 bits"),
        ("[{}]", 'entry 0: an object must have "op"'),
        ('[{"op": "matmul"}]', "entry 0: op must be one of sdpa, "),
        ('[{"op": "sdpa", "q": [1, 2]}]', "entry 0: "),
        ('[{"op": "sdpa", "q": [[1, 4, 64, 64], "bf17"]}]', "entry 0: 'bf17' is not a dtype"),
        (
            '[{"op": "sdpa", "q": [[1, 4, 64, 64], "bf16"], "causal": true}]',
            "did you mean is_causal",
        ),
    ],
)
def test_what_is_refused(content, message, path):
    path.write_text(content, encoding="latin-1")
    with pytest.raises(ValueError, match=message) as refusal:
        load_requests(path)
    assert str(path) in str(refusal.value)


def test_requests_of_another_version_are_refused_whatever_they_say(path):
    save_requests(plan_requests("sdpa", QUERY, KEY), path)
    content = json.loads(path.read_text())
    content["graphs"] = "0" * 16
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="record them again"):
        load_requests(path)
