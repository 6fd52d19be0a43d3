"""``python -m cudnn_ops bench``: what it times, its table and its plot, on a CPU."""

from __future__ import annotations

import re

import pytest
import torch

from cudnn_ops.__main__ import main
from cudnn_ops.plans import bench, figure

#: For each operator its arguments, and the names of the cases.
CALLS = {
    "sdpa": (
        "-q 1,4,16,32 2,4,33,32 -k 1,2,16,32 2,2,40,32 --causal",
        ["1,4,16,32 x 1,2,16,32", "2,4,33,32 x 2,2,40,32"],
    ),
    "rms_norm": ("--input 7,64 3,100", ["7,64", "3,100"]),
    "layer_norm": ("--input 7,64 --bias --dtype fp32", ["7,64"]),
    "conv1d": ("-q 2,8,20 -k 4,8,3 --padding 1", ["2,8,20 x 4,8,3"]),
    "conv2d": (
        "-q 2,8,9,9 2,8,5,5 -k 8,8,3,3 --padding 1 --bias --residual --activation gelu",
        ["2,8,9,9 x 8,8,3,3", "2,8,5,5 x 8,8,3,3"],
    ),
    "conv3d": ("-q 1,4,5,6,7 -k 4,2,3,3,3 --groups 2 --dtype fp32", ["1,4,5,6,7 x 4,2,3,3,3"]),
    "conv_transpose1d": ("-q 2,8,20 -k 8,4,4 --stride 2 --padding 1", ["2,8,20 x 8,4,4"]),
    "conv_transpose2d": (
        "-q 2,8,5,5 -k 8,4,3,3 --stride 2 --output-padding 1 0 --bias --activation relu",
        ["2,8,5,5 x 8,4,3,3"],
    ),
    "conv_transpose3d": (
        "-q 1,4,3,4,5 -k 4,2,2,2,2 --stride 2 --groups 2 --dtype fp32",
        ["1,4,3,4,5 x 4,2,2,2,2"],
    ),
}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(bench, "_ROUNDS", {"cpu": 1, "cuda": 1})


def test_every_operator_is_called():
    assert set(CALLS) == set(bench.BENCHES)


@pytest.mark.parametrize("op", CALLS)
def test_the_table(op, capsys):
    arguments, cases = CALLS[op]
    assert main(["bench", op, "--device", "cpu", *arguments.split()]) == 0
    title, head, *lines = capsys.readouterr().out.splitlines()
    assert title.startswith(f"{op} on the CPU, torch ")
    assert "say nothing about a GPU" in title
    assert head.split() == ["cudnn_ops", "torch", "torch/cudnn_ops"]
    names = [re.split(r"  +", line)[0] for line in lines]
    assert names == [f"{case} {way}" for case in cases for way in ("forward", "backward")]
    for line in lines:
        ours, theirs, ratio = map(float, line.split()[-3:])
        assert ours > 0
        assert ratio == pytest.approx(theirs / ours, abs=0.01, rel=0.01)


def test_the_forward_alone(capsys):
    assert main(["bench", "rms_norm", "--device", "cpu", "-q", "5,8", "--inference"]) == 0
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()[2:]] == [
        ["5,8", "forward"]
    ]


@pytest.mark.parametrize("op", CALLS)
def test_both_compute_the_same(op, monkeypatch):
    """Results and gradients: what is timed is one and the same computation."""
    seen = []

    def timing(case, functions, tensor):
        results = [function() for function in functions.values()]
        flat = [result if isinstance(result, tuple) else (result,) for result in results]
        for ours, theirs in zip(*flat, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
        seen.append(case)
        return bench.Timing(case, 1.0, 1.0)

    monkeypatch.setattr(bench, "_timing", timing)
    draw = bench.random_like
    monkeypatch.setattr(bench, "random_like", lambda *arguments: draw(*arguments).double())
    assert main(["bench", op, "--device", "cpu", *CALLS[op][0].split()]) == 0
    assert len(seen) == 2 * len(CALLS[op][1])


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_the_plot(suffix, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / f"norms.{suffix}"
    arguments = ["bench", "rms_norm", "--device", "cpu", "-q", "5,8", "9,16", "--plot", str(path)]
    assert main(arguments) == 0
    assert capsys.readouterr().out.endswith(f"plot: {path}\n")
    assert path.stat().st_size > 1000
    if suffix == "svg":
        assert "<svg" in path.read_text()


def test_matplotlib_is_optional(tmp_path, monkeypatch, capsys):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(figure, "import_module", missing)
    monkeypatch.setattr(bench, "measure", lambda *_, **__: pytest.fail("it measures"))
    arguments = ["bench", "rms_norm", "--device", "cpu", "--plot", str(tmp_path / "x.svg")]
    assert main(arguments) == 2
    assert "--plot needs matplotlib" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sdpa", "-q", "1,2,3,4", "1,2,5,4", "1,2,6,4", "-k", *["1,2,3,4"] * 2], "-k needs one"),
        (["rms_norm", "--plot", "no/such/x.svg"], "no/such is not a folder"),
        (["conv2d", "-q", "1,8,9,9", "-k", "8,4,3,3"], "channels"),
    ],
)
def test_mistakes(arguments, message, capsys):
    assert main(["bench", arguments[0], "--device", "cpu", *arguments[1:]]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["paged_attention"], "invalid choice"),
        (["sdpa", "-q", "1,2,3"], "is not batch,heads,length,head_size"),
        (["sdpa", "--softcap", "3"], "unrecognized arguments: --softcap 3"),
    ],
)
def test_what_argparse_refuses(arguments, message, capsys):
    with pytest.raises(SystemExit):
        main(["bench", *arguments])
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(capsys):
    assert main(["bench", "rms_norm", "--device", "cuda"]) == 2
    assert "--device cuda needs a GPU" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize("op", CALLS)
def test_on_a_gpu(op, capsys):
    arguments = [word for word in CALLS[op][0].split() if word not in ("--dtype", "fp32")]
    assert main(["bench", op, *arguments]) == 0
    assert "GPU time of one call in ms" in capsys.readouterr().out
