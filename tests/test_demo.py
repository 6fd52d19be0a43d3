"""Tests of the example programs belong here: the demo must really learn, under torch.compile."""

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from cudnn_ops.integrations.transformers_serving import load_tokenizer
from examples import generate as generate_example
from examples import serve as serve_example
from examples import train_llama
from examples.generate import GenerateConfig, generate, report, sample_text
from examples.llama import Llama, LlamaConfig, Operators
from examples.train_llama import CHECKPOINT, Recipe, TrainConfig, Trainer, train
from examples.train_llama import report as training_report
from tests.conftest import DEVICES

ROOT = Path(__file__).parents[1]


def byte_frequency_loss() -> float:
    """Held-out nats per byte of the training bytes' frequencies, independent of the demo's code."""
    text = np.frombuffer("\n\n".join(topics[name] for name in sorted(topics)).encode(), np.uint8)
    fitted, heldout = np.split(text, [len(text) * 9 // 10])
    frequencies = np.bincount(fitted, minlength=256) / len(fitted)
    used = np.bincount(heldout, minlength=256) / len(heldout)
    seen = (frequencies > 0) & (used > 0)
    return float(-(used[seen] * np.log(frequencies[seen])).sum())


def test_training_beats_byte_frequencies(tmp_path: Path) -> None:
    summary = train(TrainConfig(device="cpu", steps=30, out=tmp_path))

    assert summary.unigram_loss == pytest.approx(byte_frequency_loss(), abs=0.01)
    assert summary.heldout_loss < byte_frequency_loss() - 0.2
    assert summary.history.heldout_losses[30] == summary.heldout_loss
    assert summary.torch_heldout_loss == pytest.approx(summary.heldout_loss, rel=1e-5)
    assert f"by torch alone  {summary.torch_heldout_loss:.3f}" in training_report(summary, tmp_path)
    assert len(summary.history.train_losses) == 30
    assert summary.tokens_per_second > 0

    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert (tmp_path / "sample.txt").read_text(encoding="utf-8") == summary.sample != ""
    trained = Llama.load(tmp_path / CHECKPOINT, Operators.named("cudnn_ops"))
    assert sum(weight.numel() for weight in trained.parameters()) == summary.parameters
    written = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))
    assert written == json.loads(json.dumps(asdict(summary)))


@pytest.mark.parametrize("device", DEVICES)
def test_torch_alone_learns_the_same(device: str) -> None:
    recipe = Recipe(LlamaConfig(2, 64, 2, 1, sequence=32, vocabulary=16), 4, 3, 1e-2)
    trainers = []
    for name in ("cudnn_ops", "torch"):
        torch.manual_seed(0)
        trainers.append(Trainer(recipe, name, torch.device(device), compiled=False))
    ours, stock = (trainer.model.state_dict() for trainer in trainers)
    assert list(ours) == list(stock)
    assert all(torch.equal(ours[name], stock[name]) for name in ours)
    torch.manual_seed(1)
    windows = torch.randint(16, (recipe.batch, 33)).to(device)
    losses = [[trainer.step(windows).item() for _ in range(recipe.steps)] for trainer in trainers]
    assert losses[0][-1] < losses[0][0]
    # What is bf16 on a GPU is rounded at other places.
    assert losses[0] == pytest.approx(losses[1], rel=1e-5 if device == "cpu" else 1e-2)


def test_serving_a_checkpoint(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Llama(LlamaConfig(1, 32, 4, 2, sequence=64), Operators.named("cudnn_ops"))
    model.save(tmp_path / CHECKPOINT)
    config = GenerateConfig(
        checkpoint=tmp_path / CHECKPOINT, device="cpu", prompts=9, max_tokens=16, max_batch=3
    )
    result = generate(config)
    assert result is not None
    summary, requests = result
    assert summary.requests == len(requests) == 9
    assert summary.output_tokens == 9 * 16
    assert summary.prompt_tokens == 9 * 48
    assert summary.prefix_hits > 0
    assert 0 < summary.time_to_first_token_median <= summary.time_to_first_token_p99
    assert f"{summary.tokens_per_second:,.0f} tokens/s" in report(summary)
    assert "+++" in sample_text(requests[0])
    outputs = [request.output for request in requests]
    again = generate(config)
    assert again is not None
    assert [request.output for request in again[1]] == outputs
    assert "draft tokens" not in report(again[0])
    speculative = generate(replace(config, draft_tokens=3))
    assert speculative is not None
    assert [request.output for request in speculative[1]] == outputs
    assert speculative[0].speculation.drafts > 0
    assert "tokens a verification" in report(speculative[0])

    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    program = ["tests.distributed.ended", "examples.generate"]
    arguments = ["--checkpoint", str(tmp_path / CHECKPOINT), "--device", "cpu", "--tp", "2"]
    arguments += ["--prompts", "9", "--max-tokens", "16", "--max-batch", "3"]
    shared = subprocess.run(
        [sys.executable, "-m", *torchrun, "-m", *program, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert shared.returncode == 0, shared.stderr
    assert "tokens, on cpu x 2\n" in shared.stdout
    assert shared.stdout.count("+++") == 3
    for request in requests[:3]:
        assert sample_text(request) in shared.stdout


def test_a_folder_of_transformers_is_the_same_model(tmp_path: Path, capsys) -> None:
    """And a server of it answers: greedily, what the model itself says."""
    torch.manual_seed(0)
    model = Llama(LlamaConfig(2, 32, 4, 2, sequence=64), Operators.named("cudnn_ops"))
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(3 if weight.dim() == 2 else 1)
    model.save(tmp_path / CHECKPOINT)
    config = serve_example.ServeConfig(
        tmp_path / CHECKPOINT, tmp_path / "llama", prompt="né\n", max_tokens=20, temperature=0.0
    )
    serve_example.write_folder(config)
    tokens = torch.tensor([[*"né\n".encode()]])
    tokenizer = load_tokenizer(config.out)
    assert tokenizer.encode("né\n") == tokens[0].tolist()
    assert [tokenizer.encode(chr(byte)) for byte in range(128)] == [[byte] for byte in range(128)]
    theirs = LlamaForCausalLM.from_pretrained(config.out)
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, model(tokens), rtol=1e-4, atol=1e-4)
        for _ in range(20):
            tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], 1)
    expected = bytes(tokens[0, 4:].tolist()).decode(errors="replace")
    arguments = ["--checkpoint", str(config.checkpoint), "--out", str(config.out)]
    arguments += ["--prompt", "né\n", "--max-tokens", "20", "--temperature", "0", "--device", "cpu"]
    assert serve_example.main(arguments) == 0
    shown = capsys.readouterr().out
    assert shown == (
        f"--- né\n\n+++ {expected}\n\nserve it: python -m cudnn_ops serve {config.out}\n"
    )


def test_a_checkpoint_that_is_not_there_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"python -m examples.train_llama"):
        generate(GenerateConfig(checkpoint=tmp_path / "none.pt", device="cpu"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("program", [train_llama, generate_example], ids=["train", "generate"])
def test_no_gpu_is_told_in_a_line(program, capsys) -> None:
    assert program.main(["--device", "cuda"]) == 2
    assert capsys.readouterr().err == "error: --device cuda needs a GPU, and torch finds none\n"


@pytest.mark.parametrize(
    ("program", "arguments", "message"),
    [
        (train_llama, ["--out", "{file}"], "File exists"),
        (train_llama, ["--steps", "0"], "--steps must be at least 1"),
        (train_llama, ["--seed", str(2**63)], "--seed must fit into 64 bits"),
        (generate_example, ["--checkpoint", "{file}"], "is not what `python -m examples."),
        (generate_example, ["--checkpoint", "none.pt"], "none.pt is not there"),
        (generate_example, ["--random", "--temperature", "-1"], "temperature must be at least 0"),
        (generate_example, ["--random", "--top-p", "3"], "top_p must be more than 0"),
        (generate_example, ["--random", "--max-tokens", "9999"], "--max-tokens is 1 to 252"),
        (generate_example, ["--random", "--pages", "1"], "a request has room for 16"),
        (generate_example, ["--samples", "-1"], "--samples must be at least 0"),
        (serve_example, ["--checkpoint", "{file}"], "is not what `python -m examples."),
        (serve_example, ["--checkpoint", "none.pt"], "none.pt is not there"),
        (serve_example, ["--seed", str(2**63)], "--seed must fit into 64 bits"),
        (generate_example, ["--draft-tokens", "-1"], "--draft-tokens must be at least 0"),
        (generate_example, ["--tp", "0"], "--tp must be at least 1"),
        (generate_example, ["--random", "--tp", "2"], "torchrun --nproc-per-node 2"),
    ],
)
def test_bad_arguments_end_with_a_line(program, arguments, message, tmp_path, capsys) -> None:
    """And status 2: no traceback, and nothing is computed before."""
    (tmp_path / "file").write_text("no model")
    arguments = [argument.format(file=tmp_path / "file") for argument in arguments]
    threads = torch.get_num_threads()
    try:
        status = program.main(["--device", "cpu", *arguments])
    except SystemExit as exit:  # argparse's
        status = exit.code
    torch.set_num_threads(threads)
    assert status == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
