"""Trains the byte-level Llama of `train_llama.py` on several GPUs, or CPU processes.

    torchrun --nproc-per-node 4 -m examples.train_llama_distributed --tp 2 --fsdp --compile

Processes form a mesh: `--tp` of them share each layer's heads and widths, `--cp` such groups share
each sequence, and as many of these as there are train on parts of the batch. Each step is that of
one process with the whole batch. The
checkpoint is written by torch.distributed.checkpoint, and another mesh can read it (`--resume`).
What belongs here: the mesh, the training loop, checkpoints and the command line; how the model is
spread is in `parallel.py`.
"""

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, distributed, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from examples.llama import Llama, Operators
from examples.parallel import (
    checkpoint_blocks,
    compile_blocks,
    own_part,
    shard_data,
    shard_tensors,
    split_sequence,
)
from examples.processes import process_group
from examples.train_llama import (
    RECIPES,
    Recipe,
    check_seed,
    kind_of_device,
    load_text,
    random_batches,
)

WARM_UP_STEPS = 20
DATA, CONTEXT, TENSOR = "data", "context", "tensor"  # the mesh's dimensions


@dataclass(frozen=True)
class Config:
    """The command line's choices."""

    device: str = "auto"
    steps: int | None = None
    operators: str = "cudnn_ops"
    out: Path = Path("distributed_output")
    tp: int = 1
    cp: int = 1
    fsdp: bool = False
    compile: bool = False
    recompute: bool = False
    save_every: int | None = None
    resume: Path | None = None
    seed: int = 0


@dataclass
class Progress:
    """What the training loop saw; losses are in nats per byte, over all processes."""

    first_step: int = 0  # not 0 where a checkpoint was resumed
    losses: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Summary:
    """What one run measured."""

    device: str
    operators: str
    mesh: dict[str, int]
    fsdp: bool
    compiled: bool
    parameters: int
    tokens_per_second_each: float  # of the median step, for each process
    peak_mib: float | None  # of the first process's GPU
    progress: Progress


class Trainer:
    """A model that is spread over a mesh, its optimizer and its part of each batch."""

    def __init__(self, config: Config, recipe: Recipe, mesh: DeviceMesh) -> None:
        torch.manual_seed(config.seed)
        self.mesh, self.data, self.context = mesh, mesh[DATA], mesh[CONTEXT]
        # Those that have other tokens: gradients are summed over them.
        self.others = mesh[DATA, CONTEXT]._flatten("others")
        self.model = Llama(recipe.model, Operators.named(config.operators)).to(mesh.device_type)
        if config.tp > 1:
            shard_tensors(self.model, mesh[TENSOR])
        if config.cp > 1:
            split_sequence(self.model, self.context)
        if config.recompute:
            checkpoint_blocks(self.model)
        if config.compile:
            compile_blocks(self.model)
        self.forward: Callable[[Tensor], Tensor] = self.model
        if config.fsdp:
            bf16 = torch.bfloat16 if mesh.device_type == "cuda" else None
            shard_data(self.model, self.others, bf16)
        elif self.others.size() > 1:
            # Buffers are the angles of a process's own positions.
            self.forward = DistributedDataParallel(
                self.model, process_group=self.others.get_group(), broadcast_buffers=False
            )
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), recipe.learning_rate, (0.9, 0.95), weight_decay=0.1
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda done: min(1.0, (done + 1) / WARM_UP_STEPS)
        )

    def step(self, windows: Tensor) -> Tensor:
        """One update on all processes' token windows [B, S + 1]; returns the loss of its own."""
        own = windows.chunk(self.data.size())[self.data.get_local_rank()]
        tokens, following = own[:, :-1], own[:, 1:]
        if self.context.size() > 1:
            tokens, following = (own_part(t, self.context, 1) for t in (tokens, following))
        self.optimizer.zero_grad()
        logits = self.forward(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), following.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        return loss.detach()

    def over_all(self, loss: Tensor) -> float:
        """The mean of a loss over the parts of the batch and of its sequences."""
        total = loss.clone()
        distributed.all_reduce(total, group=self.others.get_group())
        return total.item() / self.others.size()

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds, under the model's own names and whatever the mesh."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "schedule": self.schedule.state_dict()}

    def save(self, folder: Path) -> None:
        """Writes a checkpoint; every process writes its part."""
        checkpoint.save(self.state(), checkpoint_id=folder)

    def load(self, folder: Path) -> int:
        """Reads a checkpoint of any mesh, and tells how many steps it took."""
        state = self.state()
        checkpoint.load(state, checkpoint_id=folder)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.schedule.load_state_dict(state["schedule"])
        return self.schedule.last_epoch


def run_steps(trainer: Trainer, config: Config, recipe: Recipe, steps: int) -> Progress:
    """Takes the steps, each on the same windows whatever the mesh, and writes checkpoints."""
    device = torch.device(trainer.mesh.device_type)
    text, _ = load_text(device)
    progress = Progress()
    if config.resume is not None:
        progress.first_step = trainer.load(config.resume)
    last = progress.first_step + steps
    generator = torch.Generator(device).manual_seed(config.seed)
    batches = random_batches(text, recipe, generator)
    for done, windows in enumerate(itertools.islice(batches, last), 1):
        if done <= progress.first_step:
            continue
        start = time.perf_counter()
        loss = trainer.over_all(trainer.step(windows))  # waits for the step
        progress.step_seconds.append(time.perf_counter() - start)
        progress.losses.append(loss)
        if distributed.get_rank() == 0:
            print(f"step {done}: loss {loss:.3f}, {progress.step_seconds[-1]:.3f} s", flush=True)
        if done == last or (config.save_every and done % config.save_every == 0):
            trainer.save(config.out / f"checkpoint-{done}")
    return progress


def check_mesh(config: Config, recipe: Recipe, processes: int) -> int:
    """How many groups of processes train on parts of the batch.

    Raises:
        ValueError: the processes do not form such a mesh, or the batch has no such parts.
    """
    if processes % (config.tp * config.cp) != 0:
        shares = f"--tp {config.tp}" if config.cp == 1 else f"--tp {config.tp} --cp {config.cp}"
        raise ValueError(f"{shares} does not divide the {processes} processes")
    groups = processes // (config.tp * config.cp)
    if config.tp > 1 and groups * config.cp > 1 and not config.fsdp:
        raise ValueError(f"--tp {config.tp} of {processes} processes needs --fsdp for the others")
    if config.cp > 1 and config.operators != "cudnn_ops":
        raise ValueError(f"--cp needs --operators cudnn_ops, got {config.operators}")
    if recipe.model.sequence % (2 * config.cp) != 0:
        raise ValueError(
            f"--cp {config.cp} cannot share sequences of {recipe.model.sequence} tokens evenly"
        )
    if recipe.batch % groups != 0:
        raise ValueError(f"{groups} groups cannot share a batch of {recipe.batch} evenly")
    return groups


def train(config: Config) -> Summary:
    """Trains, and writes the results to `config.out`."""
    kind = kind_of_device(config.device)
    recipe = RECIPES[kind]
    groups = check_mesh(config, recipe, distributed.get_world_size())
    config.out.mkdir(parents=True, exist_ok=True)
    sizes = {DATA: groups, CONTEXT: config.cp, TENSOR: config.tp}
    mesh = init_device_mesh(kind, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    trainer = Trainer(config, recipe, mesh)
    parameters = sum(weight.numel() for weight in trainer.model.parameters())
    steps = recipe.steps if config.steps is None else config.steps
    progress = run_steps(trainer, config, recipe, steps)
    tokens = recipe.batch * recipe.model.sequence / mesh.size()
    summary = Summary(
        device=torch.cuda.get_device_name() if kind == "cuda" else kind,
        operators=config.operators,
        mesh=sizes,
        fsdp=config.fsdp,
        compiled=config.compile,
        parameters=parameters,
        tokens_per_second_each=tokens / statistics.median(progress.step_seconds),
        peak_mib=torch.cuda.max_memory_allocated() / 2**20 if kind == "cuda" else None,
        progress=progress,
    )
    if distributed.get_rank() == 0:
        write_results(summary, config.out)
    return summary


def write_results(summary: Summary, out: Path) -> None:
    """Writes loss.png and summary.json into the folder `out`, which is there."""
    (out / "summary.json").write_text(json.dumps(asdict(summary), indent=2), encoding="utf-8")
    axes = (figure := Figure(figsize=(8, 5), layout="constrained")).add_subplot()
    first, losses = summary.progress.first_step, summary.progress.losses
    axes.plot(range(first + 1, first + len(losses) + 1), losses, lw=1)
    axes.set(xlabel="step", ylabel="loss (nats per byte)", ylim=(0, None))
    sizes = " x ".join(f"{size} {name}" for name, size in summary.mesh.items())
    axes.set_title(f"byte-level Llama, by {summary.operators}, {sizes}, {summary.device}")
    figure.savefig(out / "loss.png", dpi=150)


def report(summary: Summary, out: Path) -> str:
    """The lines printed at the end."""
    return (
        f"last loss       {summary.progress.losses[-1]:.3f} nats/byte\n"
        f"training speed  {summary.tokens_per_second_each:,.0f} tokens/s for each process\n"
        f"loss curve: {out / 'loss.png'}"
    )


def parse_args(argv: Sequence[str] | None = None) -> Config:
    """The command line as a Config."""
    parser = argparse.ArgumentParser(description="Train a byte-level Llama on several GPUs.")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--steps", type=int, help="training steps (default: suits the device)")
    parser.add_argument("--operators", choices=("cudnn_ops", "torch"), default="cudnn_ops")
    parser.add_argument("--out", type=Path, default=Config.out, help="folder for results")
    parser.add_argument("--tp", type=int, default=1, help="processes that share each layer")
    parser.add_argument("--cp", type=int, default=1, help="processes that share each sequence")
    parser.add_argument("--fsdp", action="store_true", help="share the weights among the others")
    parser.add_argument("--compile", action="store_true", help="compile the layers")
    parser.add_argument("--recompute", action="store_true", help="keep no activations of layers")
    parser.add_argument("--save-every", type=int, help="steps between checkpoints")
    parser.add_argument("--resume", type=Path, help="a checkpoint's folder, of any mesh")
    parser.add_argument("--seed", type=int, default=Config.seed)
    config = Config(**vars(parser.parse_args(argv)))
    check_seed(parser, config.seed)
    for name in ("steps", "tp", "cp", "save_every"):
        number = getattr(config, name)
        if number is not None and number < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if "RANK" not in os.environ:
        parser.error("start it by torchrun: torchrun --nproc-per-node 2 -m " + str(__spec__.name))
    return config


def main(argv: Sequence[str] | None = None) -> int:
    """The program; arguments that only it can judge end it with a line and status 2."""
    config = parse_args(argv)
    try:
        with process_group(kind_of_device(config.device)):
            summary = train(config)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if int(os.environ["RANK"]) == 0:
        print(report(summary, config.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
