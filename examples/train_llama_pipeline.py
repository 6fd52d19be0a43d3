"""Trains the byte-level Llama of `train_llama.py` as a pipeline, a part of its layers a process.

    torchrun --nproc-per-node 2 -m examples.train_llama_pipeline --microbatches 4

Batches pass through the processes in microbatches, by torch.distributed.pipelining. Each step is
that of one process with the whole batch.
"""

import argparse
import itertools
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, distributed, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional as F

from examples.llama import Llama, Operators
from examples.processes import process_group
from examples.train_llama import (
    RECIPES,
    check_seed,
    kind_of_device,
    load_text,
    random_batches,
)


@dataclass(frozen=True)
class Config:
    """The command line's choices."""

    device: str = "auto"
    steps: int = 20
    operators: str = "cudnn_ops"
    microbatches: int = 4
    seed: int = 0


class Stage(nn.Module):
    """Consecutive layers of a model: token ids or activations to activations or logits."""

    def __init__(self, model: Llama, index: int, count: int) -> None:
        super().__init__()
        self.is_first, self.is_last = index == 0, index == count - 1
        layers = list(model.blocks)
        first, last = (len(layers) * i // count for i in (index, index + 1))
        self.blocks = nn.Sequential(*layers[first:last])
        # The output projection is tied to the embedding: both ends have a copy.
        self.embedding = model.embedding if self.is_first or self.is_last else None
        self.norm = model.norm if self.is_last else None

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda):
            if self.is_first:
                assert self.embedding is not None
                x = self.embedding(x)
                if x.is_cuda:
                    x = x.bfloat16()
            x = self.blocks(x)
            if not self.is_last:
                return x
            assert self.embedding is not None
            assert self.norm is not None
            return F.linear(self.norm(x), self.embedding.weight).float()


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy in nats of logits [B, S, V] and tokens [B, S]."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Trainer:
    """This process's stage, its optimizer, and the schedule of all stages."""

    def __init__(self, model: Llama, microbatches: int, learning_rate: float) -> None:
        rank, count = distributed.get_rank(), distributed.get_world_size()
        if len(model.blocks) < count:
            raise ValueError(f"{count} processes cannot share {len(model.blocks)} layers")
        device = next(model.parameters()).device
        self.stage = Stage(model, rank, count)
        self.schedule = Schedule1F1B(
            PipelineStage(self.stage, rank, count, device), microbatches, next_token_loss
        )
        self.optimizer = torch.optim.AdamW(
            self.stage.parameters(), learning_rate, (0.9, 0.95), weight_decay=0.1
        )
        self.ends = distributed.new_group(sorted({0, count - 1}))

    def step(self, windows: Tensor) -> float | None:
        """One update on token windows [B, S + 1]; returns the loss in the last process."""
        self.optimizer.zero_grad()
        losses: list[Tensor] = []
        # Stages agree on strides, which microbatches of a slice do not keep.
        tokens, targets = windows[:, :-1].contiguous(), windows[:, 1:]
        given = (tokens,) if self.stage.is_first else ()
        self.schedule.step(
            *given,
            target=targets if self.stage.is_last else None,
            losses=losses if self.stage.is_last else None,
        )
        if self.stage.embedding is not None and self.stage.is_first != self.stage.is_last:
            # The two copies get the same gradient, and stay the same.
            distributed.all_reduce(self.stage.embedding.weight.grad, group=self.ends)
        self.optimizer.step()
        return torch.stack(losses).mean().item() if self.stage.is_last else None


def train(config: Config) -> list[float]:
    """Trains; returns the losses in the last process."""
    kind = kind_of_device(config.device)
    recipe = RECIPES[kind]
    if recipe.batch % config.microbatches != 0:
        raise ValueError(f"--microbatches {config.microbatches} does not divide {recipe.batch}")
    torch.manual_seed(config.seed)
    device = torch.device(kind)
    model = Llama(recipe.model, Operators.named(config.operators)).to(device)
    trainer = Trainer(model, config.microbatches, recipe.learning_rate)
    text, _ = load_text(device)
    generator = torch.Generator(device).manual_seed(config.seed)
    batches = random_batches(text, recipe, generator)
    losses = []
    for step, windows in enumerate(itertools.islice(batches, config.steps), 1):
        loss = trainer.step(windows)
        if loss is not None:
            losses.append(loss)
            print(f"step {step}: loss {loss:.3f}", flush=True)
    return losses


def parse_args(argv: Sequence[str] | None = None) -> Config:
    """The command line as a Config."""
    parser = argparse.ArgumentParser(description="Train a byte-level Llama as a pipeline.")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--steps", type=int, default=Config.steps, help="training steps")
    parser.add_argument("--operators", choices=("cudnn_ops", "torch"), default="cudnn_ops")
    parser.add_argument(
        "--microbatches", type=int, default=Config.microbatches, help="parts of each batch"
    )
    parser.add_argument("--seed", type=int, default=Config.seed)
    config = Config(**vars(parser.parse_args(argv)))
    check_seed(parser, config.seed)
    for name in ("steps", "microbatches"):
        if getattr(config, name) < 1:
            parser.error(f"--{name} must be at least 1")
    if "RANK" not in os.environ:
        parser.error("start it by torchrun")
    return config


def main(argv: Sequence[str] | None = None) -> int:
    """The program; arguments that only it can judge end it with a line and status 2."""
    config = parse_args(argv)
    try:
        with process_group(kind_of_device(config.device)):
            train(config)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
