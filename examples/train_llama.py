"""Trains a byte-level Llama on English text with cudnn_ops inside torch.compile.

    python -m examples.train_llama

The text is the language reference that every Python carries (`pydoc_data.topics`), its last tenth
held out. What belongs here: data, training, evaluation, sampling, the report and the command line;
the model is in `llama.py`. Attention, norms and the gated product are those of cudnn_ops. A CPU
trains a small model in a minute or two, a GPU a larger one. PyTorch's own operators then compute
the held-out loss of the same weights; on a GPU a step is timed with both.
"""

import argparse
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from pydoc_data.topics import topics

import torch
from matplotlib.figure import Figure
from torch import Tensor
from tqdm import trange

from examples.llama import Llama, LlamaConfig, Operators

EVALUATIONS = 5
SAMPLE_BYTES = 300
CHECKPOINT = "model.pt"  # in the results' folder; `examples.generate` serves it
TEMPERATURE = 0.7
WARM_UP_STEPS, TIMED_STEPS = 5, 20


@dataclass(frozen=True)
class TrainConfig:
    """The command line's choices."""

    device: str = "auto"
    steps: int | None = None
    operators: str = "cudnn_ops"
    out: Path = Path("demo_output")
    compile: bool = True
    seed: int = 0


@dataclass(frozen=True)
class Recipe:
    """What suits one kind of device; `batch` counts sequences."""

    model: LlamaConfig
    batch: int
    steps: int
    learning_rate: float


RECIPES = {
    "cpu": Recipe(LlamaConfig(3, 192, 6, 2, sequence=256), 8, 200, 2e-3),
    "cuda": Recipe(LlamaConfig(12, 768, 12, 4, sequence=1024), 32, 200, 6e-4),
}


@dataclass(frozen=True)
class StepTime:
    """Median time of one training step."""

    ms_per_step: float
    tokens_per_second: float


@dataclass(frozen=True)
class History:
    """What the training loop saw; losses are in nats per byte."""

    train_losses: list[float] = field(default_factory=list)
    heldout_losses: dict[int, float] = field(default_factory=dict)  # by the number of steps taken
    step_seconds: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Summary:
    """What one run measured; losses are in nats per byte."""

    device: str
    operators: str
    steps: int
    parameters: int
    heldout_loss: float
    torch_heldout_loss: float  # of the same weights by PyTorch's operators
    unigram_loss: float
    tokens_per_second: float  # of the median step, so without compilation
    first_step_seconds: float  # with compilation
    total_seconds: float
    comparison: dict[str, StepTime]  # by operators; empty on a CPU
    history: History
    sample: str


def load_text(device: torch.device) -> tuple[Tensor, Tensor]:
    """The text's bytes as two uint8 vectors: the first nine tenths and the held-out rest."""
    text = "\n\n".join(topics[name] for name in sorted(topics)).encode()
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
    split = len(data) * 9 // 10
    return data[:split], data[split:]


def random_batches(text: Tensor, recipe: Recipe, generator: torch.Generator) -> Iterator[Tensor]:
    """Endless batches [B, S + 1] of windows that start anywhere in `text`."""
    windows = text.unfold(0, recipe.model.sequence + 1, 1)
    while True:
        starts = torch.randint(
            len(windows), (recipe.batch,), generator=generator, device=text.device
        )
        yield windows[starts].long()


def unigram_loss(train: Tensor, heldout: Tensor) -> float:
    """Held-out loss of a model that knows only how often each byte occurs in `train`."""
    # Counts start at one: a byte that training never saw must not cost infinitely much.
    counts = torch.bincount(train, minlength=256).double() + 1
    return -(counts / counts.sum()).log()[heldout.long()].mean().item()


@torch.no_grad()
def heldout_loss(model: Llama, heldout: Tensor, batch: int) -> float:
    """Mean loss over `heldout` cut into consecutive windows; a last partial one is left out."""
    length = model.config.sequence
    windows = heldout.unfold(0, length + 1, length).long()
    total = 0.0
    for start in range(0, len(windows), batch):
        part = windows[start : start + batch]
        total += model.loss(part).item() * len(part)
    return total / len(windows)


@torch.no_grad()
def generate(model: Llama, prompt: Tensor, generator: torch.Generator) -> str:
    """Text that continues `prompt` [S]; the window slides, so that its shape stays [1, S]."""
    text = prompt[None].long()
    for _ in range(SAMPLE_BYTES):
        logits = model(text[:, -len(prompt) :])[:, -1]
        chosen = torch.multinomial((logits / TEMPERATURE).softmax(-1), 1, generator=generator)
        text = torch.cat((text, chosen), dim=1)
    return bytes(text[0, len(prompt) :].tolist()).decode(errors="replace")


class Trainer:
    """A model, its optimizer and its compiled loss."""

    def __init__(
        self, recipe: Recipe, operators: str, device: torch.device, *, compiled: bool
    ) -> None:
        self.model = Llama(recipe.model, Operators.named(operators)).to(device)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), recipe.learning_rate, (0.9, 0.95), weight_decay=0.1, fused=True
        )
        # The model itself stays eager for evaluation and sampling, whose shapes differ.
        self.loss: Callable[[Tensor], Tensor] = self.model.loss
        if compiled:
            self.loss = torch.compile(self.model.loss, fullgraph=True, dynamic=False)

    def step(self, windows: Tensor) -> Tensor:
        """One update on token windows [B, S + 1]; returns their loss before it."""
        self.optimizer.zero_grad()
        loss = self.loss(windows)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.detach()


def run_steps(trainer: Trainer, batches: Iterator[Tensor], heldout: Tensor, steps: int) -> History:
    """Takes `steps` steps, with warm-up and cosine decay, and evaluates now and then."""
    warm_up = max(1, steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        trainer.optimizer,
        lambda done: min((done + 1) / warm_up, (1 + math.cos(math.pi * done / steps)) / 2),
    )
    history = History()
    for done in (bar := trange(1, steps + 1, unit="step")):
        windows = next(batches)
        start = time.perf_counter()
        loss = trainer.step(windows).item()
        seconds = time.perf_counter() - start
        schedule.step()
        history.train_losses.append(loss)
        history.step_seconds.append(seconds)
        speed = windows[:, 1:].numel() / seconds
        bar.set_postfix_str(f"loss {loss:.3f}, {speed:,.0f} tokens/s")
        if done % max(1, steps // EVALUATIONS) == 0 or done == steps:
            history.heldout_losses[done] = heldout_loss(trainer.model, heldout, len(windows))
    return history


def time_side_by_side(trainers: dict[str, Trainer], batches: list[Tensor]) -> dict[str, StepTime]:
    """Times every trainer on the same batches, in turn, so that clock drift hits all alike."""
    times: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {n: [] for n in trainers}
    for windows in batches:
        for name, trainer in trainers.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            trainer.step(windows)
            end.record()
            times[name].append((start, end))
    torch.cuda.synchronize()
    tokens = batches[0][:, 1:].numel()
    result = {}
    for name, events in times.items():
        ms = statistics.median(start.elapsed_time(end) for start, end in events[WARM_UP_STEPS:])
        result[name] = StepTime(ms, 1e3 * tokens / ms)
    return result


def kind_of_device(choice: str) -> str:
    """What --device says, "cpu" or "cuda", or for "auto" which of them there is.

    Raises:
        ValueError: it says "cuda", and there is none.
    """
    if choice == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda needs a GPU, and torch finds none")
    if choice != "auto":
        return choice
    return "cuda" if torch.cuda.is_available() else "cpu"


def train(config: TrainConfig) -> Summary:
    """Trains, samples, on a GPU compares, and writes the results to `config.out`."""
    began = time.perf_counter()
    config.out.mkdir(parents=True, exist_ok=True)  # if it cannot be, say so now
    kind = kind_of_device(config.device)
    device, recipe = torch.device(kind), RECIPES[kind]
    steps = recipe.steps if config.steps is None else config.steps
    torch.manual_seed(config.seed)
    generator = torch.Generator(device).manual_seed(config.seed)

    text, heldout = load_text(device)
    batches = random_batches(text, recipe, generator)
    trainer = Trainer(recipe, config.operators, device, compiled=config.compile)
    history = run_steps(trainer, batches, heldout, steps)
    sample = generate(trainer.model, heldout[: recipe.model.sequence], generator)

    stock = trainer
    if config.operators != "torch":
        stock = Trainer(recipe, "torch", device, compiled=config.compile)
        stock.model.load_state_dict(trainer.model.state_dict())
    torch_heldout_loss = heldout_loss(stock.model, heldout, recipe.batch)
    comparison = {}
    if kind == "cuda":
        trainers = {config.operators: trainer, "torch": stock}
        timed = list(itertools.islice(batches, WARM_UP_STEPS + TIMED_STEPS))
        comparison = time_side_by_side(trainers, timed)

    tokens = recipe.batch * recipe.model.sequence
    summary = Summary(
        device=kind if kind == "cpu" else torch.cuda.get_device_name(),
        operators=config.operators,
        steps=steps,
        parameters=sum(weight.numel() for weight in trainer.model.parameters()),
        heldout_loss=history.heldout_losses[steps],
        torch_heldout_loss=torch_heldout_loss,
        unigram_loss=unigram_loss(text, heldout),
        tokens_per_second=tokens / statistics.median(history.step_seconds),
        first_step_seconds=history.step_seconds[0],
        total_seconds=time.perf_counter() - began,
        comparison=comparison,
        history=history,
        sample=sample,
    )
    write_results(summary, config.out)
    trainer.model.save(config.out / CHECKPOINT)
    return summary


def write_results(summary: Summary, out: Path) -> None:
    """Writes loss.png, sample.txt and summary.json into the folder `out`, which is there."""
    (out / "sample.txt").write_text(summary.sample, encoding="utf-8")
    (out / "summary.json").write_text(json.dumps(asdict(summary), indent=2), encoding="utf-8")
    # A Figure made without pyplot draws with Agg and needs no display.
    axes = (figure := Figure(figsize=(8, 5), layout="constrained")).add_subplot()
    axes.plot(
        range(1, summary.steps + 1), summary.history.train_losses, lw=1, label="training batch"
    )
    axes.plot(*zip(*summary.history.heldout_losses.items(), strict=True), "o-", label="held out")
    axes.axhline(summary.unigram_loss, ls="--", color="gray", label="byte frequencies alone")
    axes.set(xlabel="step", ylabel="loss (nats per byte)", ylim=(0, None))
    axes.set_title(f"byte-level Llama, by {summary.operators}, {summary.device}")
    axes.legend()
    figure.savefig(out / "loss.png", dpi=150)


def report(summary: Summary, out: Path) -> str:
    """The lines printed at the end."""
    lines = [
        f"held-out loss   {summary.heldout_loss:.3f} nats/byte"
        f" (byte frequencies alone: {summary.unigram_loss:.3f})",
        f"by torch alone  {summary.torch_heldout_loss:.3f} nats/byte, of the same weights",
        f"training speed  {summary.tokens_per_second:,.0f} tokens/s on {summary.device}",
        f"total time      {summary.total_seconds:.0f} s"
        f" (first step with compilation: {summary.first_step_seconds:.0f} s)",
    ]
    if summary.comparison:
        lines += ["", f"{'operators':<14}{'ms/step':>10}{'tokens/s':>12}"]
        for name, times in summary.comparison.items():
            lines.append(f"{name:<14}{times.ms_per_step:>10.2f}{times.tokens_per_second:>12,.0f}")
    lines += ["", f"loss curve: {out / 'loss.png'}", f"sample: {out / 'sample.txt'}"]
    return "\n".join([*lines, "", summary.sample])


def check_seed(parser: argparse.ArgumentParser, seed: int) -> None:
    """Ends the program where torch's generators do not take the seed."""
    if not -(2**63) <= seed < 2**63:
        parser.error("--seed must fit into 64 bits")


def parse_args(argv: Sequence[str] | None = None) -> TrainConfig:
    """The command line as a TrainConfig."""
    parser = argparse.ArgumentParser(description="Train a byte-level Llama with cudnn_ops.")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--steps", type=int, help="training steps (default: suits the device)")
    parser.add_argument("--operators", choices=("cudnn_ops", "torch"), default="cudnn_ops")
    parser.add_argument("--out", type=Path, default=TrainConfig.out, help="folder for results")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--seed", type=int, default=TrainConfig.seed)
    config = TrainConfig(**vars(parser.parse_args(argv)))
    check_seed(parser, config.seed)
    if config.steps is not None and config.steps < 1:
        parser.error("--steps must be at least 1")
    return config


def main(argv: Sequence[str] | None = None) -> int:
    """The program; arguments that only it can judge end it with a line and status 2."""
    config = parse_args(argv)
    try:
        print(report(train(config), config.out))
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
