"""Several GPUs beside one: attention over a split sequence, serving and training a Llama.

Attention is forward + backward, and its memory is the peak beyond its inputs. Serving decodes by
split heads with a model of Llama 3 8B's sizes, and its memory is all that the engine holds on a
GPU. Training is forward + backward of eight layers of that model's width, tensor parallel with
norms split by tokens, and by FSDP2, with our operators and with the stock ones; its memory is the
peak beyond the weights. `products` is the bound: the same step without norms and the sums before
them, rotary embedding and gated activations, never compiled. Products, attention, other sums, the
loss and what passes between GPUs remain.

One process a GPU. `torchrun --nproc-per-node 2 -m benchmarks.bench_distributed --out FILE` gives
them; run by itself it starts one for each GPU that is there, and with a single GPU measures
nothing. The tensors are those of bench_sdpa, whole on every GPU, each of which attends to its part.
"""

import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import spawn
from torch.nn import functional as F

import cudnn_ops
from benchmarks import bench_generation, peers
from benchmarks.bench_sdpa import TOLERANCE, Shape, tensors
from benchmarks.harness import OURS, Rows, main, peak_bytes
from cudnn_ops.distributed import (
    all_to_all_attention,
    heads_of_rank,
    ring_attention,
    zigzag_shard,
)
from cudnn_ops.generation import Engine, SamplingParams
from cudnn_ops.plans.timing import SLEEP_CYCLES, interleaved
from examples.llama import Llama, LlamaConfig, Operators
from examples.parallel import compile_blocks, shard_data, shard_for_serving, shard_tensors

ONE = "one gpu"
SHAPES = tuple(Shape(1, 32, 8, length, 128, causal=True) for length in (32768, 131072))
WARM_UP_STEPS = 3

SERVED = bench_generation.LLAMA_8B.config
BATCHES = (1, 64)  # requests that all decode
PROMPT = 1024  # tokens
DECODE_STEPS = 8  # a round

TRAINED = LlamaConfig(8, 4096, 32, 8, sequence=8192, vocabulary=32000)
TRAINED_BATCH = 2
SPREADS = {"tensor parallel": shard_tensors, "FSDP": shard_data}
# Of a step's loss and of its gradients' norm, beside the stock operators'.
STEP_TOLERANCE = 1e-2

PARTS = ("ring", "serving", *SPREADS)
BOUND = "products"
ALL_TO_ALL = "all_to_all"
MINE = (OURS, ALL_TO_ALL)

Step = Callable[[], Sequence[Tensor]]


def run(rows: Rows, rounds: int) -> None:
    run_parts(PARTS, rows, rounds)


def run_part(part: str, rows: Rows, rounds: int) -> None:
    run_parts((part,), rows, rounds)


def run_parts(parts: Sequence[str], rows: Rows, rounds: int) -> None:
    if "RANK" in os.environ:  # of torchrun
        return as_rank(parts, rows, rounds)
    gpus = torch.cuda.device_count()
    if gpus < 2:
        print("a sequence is split over two GPUs or more: nothing is measured on one")
        sys.exit(0)
    for part in parts:  # one that fails leaves the rows of those before
        with tempfile.TemporaryDirectory() as folder:
            spawn(_started, (gpus, Path(folder), (part,), rounds), nprocs=gpus)
            rows.rows += json.loads((Path(folder) / "rows.json").read_text())
    return None


def _started(rank: int, gpus: int, folder: Path, parts: Sequence[str], rounds: int) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(gpus)}
    rows = Rows({})
    as_rank(parts, rows, rounds, init_method=f"file://{folder / 'rendezvous'}")
    if rank == 0:
        (folder / "rows.json").write_text(json.dumps(rows.rows))


def as_rank(parts: Sequence[str], rows: Rows, rounds: int, init_method: str = "env://") -> None:
    """Measures beside the other ranks, which do what the first was told to; all have its rows."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group("nccl", init_method=init_method, rank=rank, world_size=ranks)
    mesh = init_device_mesh("cuda", (ranks,))
    agreed: list[Any] = [parts, rounds]
    distributed.broadcast_object_list(agreed, src=0)
    parts, rounds = agreed
    # Plans of their own for all shapes, which come often in such programs.
    with cudnn_ops.using_plan_policy("exact"):
        measure_parts(parts, rounds, mesh, rows)
    distributed.destroy_process_group()


def measure_parts(parts: Sequence[str], rounds: int, mesh: DeviceMesh, rows: Rows) -> None:
    if "ring" in parts:
        for shape in SHAPES:
            measure(shape, mesh, rows, max(rounds // 5, 1))  # steps of a second
    if "serving" in parts:
        for batch in BATCHES:
            measure_serving(SERVED, batch, PROMPT, mesh, rows, rounds)
    for spread, compiled in product(SPREADS, (False, True)):
        if spread in parts:
            measure_training(TRAINED, spread, compiled, mesh, rows, rounds)


def measure(shape: Shape, mesh: DeviceMesh, rows: Rows, rounds: int) -> None:
    """Check every implementation at the shape, then add its rows."""
    whole = tensors(shape, mesh.device_type)
    parts = [zigzag_shard(tensor.detach(), mesh, 2) for tensor in whole]
    for tensor in parts[:3]:
        tensor.requires_grad_()
    one = partial(cudnn_ops.scaled_dot_product_attention, is_causal=True, enable_gqa=True)
    steps: dict[str, Step] = {
        name: partial(forward_backward, attention, parts)
        for name, attention in attentions(mesh).items()
    }
    steps["torch"] = partial(_torch, mesh, partial(forward_backward, _stock, parts))
    alone = partial(forward_backward, one, whole)
    expected = [zigzag_shard(tensor, mesh, 2) for tensor in alone()]
    for name in list(steps):
        try:
            verify(f"{name} at {shape}", steps[name](), expected)
        except NotImplementedError as error:
            print(f"{name} does not support {shape}, and is left out: {error}")
            del steps[name]
        except ArithmeticError as error:
            if name in MINE:
                raise
            print(f"{error}: it is left out")
            del steps[name]
    del expected
    # The others wait for it.
    steps[ONE] = alone if mesh.get_local_rank() == 0 else lambda: ()
    case = f"ring {shape}, {mesh.size()} GPUs"
    for name, seconds in step_seconds(steps, rounds).items():
        rows.add(case, name, "tokens_per_s", shape.batch * shape.length / seconds)
    for name, step in steps.items():
        rows.add(case, name, "peak_mib", largest(peak_bytes(step)) / 2**20)


def attentions(mesh: DeviceMesh) -> dict[str, peers.Attention]:
    """Everyone's attention over parts in zigzag order."""
    options: dict[str, Any] = {"is_causal": True, "enable_gqa": True, "order": "zigzag"}
    found: dict[str, peers.Attention] = {
        OURS: partial(ring_attention, mesh=mesh, **options),
        ALL_TO_ALL: partial(all_to_all_attention, mesh=mesh, **options),
    }
    try:
        theirs = import_module("ring_flash_attn").zigzag_ring_flash_attn_func
    except ImportError:
        print("ring_flash_attn is not installed: left out")
        return found

    def ring_flash_attn(*inputs: Tensor) -> Tensor:
        packed = (tensor.transpose(1, 2) for tensor in inputs)
        out: Tensor = theirs(*packed, causal=True, group=mesh.get_group())
        return out.transpose(1, 2)

    return found | {"ring_flash_attn": ring_flash_attn}


def _stock(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def _torch(mesh: DeviceMesh, step: Step) -> Sequence[Tensor]:
    """The step over a split sequence by torch's own means, which the backward needs too."""
    from torch.distributed.tensor.experimental import context_parallel

    # It asks for a tensor to split, and is given one that nothing reads.
    buffer = torch.zeros(2 * mesh.size(), device=mesh.device_type)
    with (
        peers.backend("torch_cudnn"),
        context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[0]),
    ):
        return step()


def forward_backward(attention: peers.Attention, given: Sequence[Tensor]) -> tuple[Tensor, ...]:
    *inputs, grad_out = given
    out = attention(*inputs)
    return out.detach(), *torch.autograd.grad(out, inputs, grad_out)


def verify(what: str, results: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Raise ArithmeticError, on all ranks, if a result of one's is not what one GPU gives."""
    for name, result, right in zip(("out", "dq", "dk", "dv"), results, expected, strict=True):
        error = ((result.float() - right.float()).norm() / right.float().norm()).item()
        error = largest(error)
        if not error <= TOLERANCE:
            raise ArithmeticError(f"{what}: {name} is {error:.3g} away from one GPU's")


def step_seconds(steps: dict[str, Step], rounds: int) -> dict[str, float]:
    """Median time of a step of each implementation, on the GPU that takes longest."""
    for step in steps.values():
        for _ in range(WARM_UP_STEPS):
            step()
    samples: dict[str, list[float]] = {name: [] for name in steps}
    for name in interleaved(steps, rounds):
        samples[name].append(largest(_sample(steps[name])) / 1e3)
    return {name: statistics.median(values) for name, values in samples.items()}


def _sample(step: Step) -> float:
    """Milliseconds of a step that all ranks begin together, behind what it takes to launch it."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    distributed.barrier()
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP_CYCLES)
    start.record()
    step()
    end.record()
    end.synchronize()
    elapsed: float = start.elapsed_time(end)
    return elapsed


def measure_serving(
    config: LlamaConfig, batch: int, prompt: int, mesh: DeviceMesh, rows: Rows, rounds: int
) -> None:
    """Tokens a second of so many requests that decode, by all GPUs and by the first one alone."""
    steps = WARM_UP_STEPS + rounds * DECODE_STEPS
    held: dict[str, float] = {}
    before = _allocated()
    engines: dict[str, Engine] = {}
    with _decoding(config, batch, prompt, steps, mesh) as ours:
        if ours.is_leader:
            engines[OURS] = _prefilled(ours, config, batch, prompt)
            held[OURS] = _allocated() - before
            alone = _decoding(config, batch, prompt, steps, None)
            engines[ONE] = _prefilled(alone, config, batch, prompt)
            held[ONE] = _allocated() - before - held[OURS]
            seconds = _decode_seconds(engines, rounds)
        else:
            ours.follow()
            held[OURS] = _allocated() - before
    peak = largest(held[OURS])
    if not ours.is_leader:
        return
    case = f"serving, {batch} requests, {mesh.size()} GPUs"
    for name, taken in seconds.items():
        rows.add(case, name, "tokens_per_s", batch * DECODE_STEPS / taken)
    for name, size in {OURS: peak, ONE: held[ONE]}.items():
        rows.add(case, name, "peak_mib", size / 2**20)


def _decoding(
    config: LlamaConfig, batch: int, prompt: int, steps: int, mesh: DeviceMesh | None
) -> Engine:
    """An engine with room for what is decoded, around this GPU's part of the model."""
    device = "cpu" if distributed.get_backend() == "gloo" else "cuda"
    torch.manual_seed(0)
    with torch.device(device):
        model = Llama(config, Operators.named("torch"))
    model.to(torch.bfloat16).requires_grad_(False)
    heads_kv = config.kv_heads
    if mesh is not None:
        shard_for_serving(model, mesh)
        _, heads_kv = heads_of_rank(config.heads, config.kv_heads, mesh)
    page = bench_generation.PAGE
    # The prompts of some are computed while others decode.
    longest = prompt + steps + batch * -(-prompt // bench_generation.LLAMA_8B.chunk) + 1
    cache = cudnn_ops.PagedKVCache(
        config.layers,
        batch * -(-longest // page),
        page,
        heads_kv,
        config.head_size,
        dtype=torch.bfloat16,
        device=device,
    )
    return Engine(
        model.serve,
        cache,
        max_batch=batch,
        chunk=bench_generation.LLAMA_8B.chunk,
        max_length=longest,
        mesh=mesh,
        overlap=False,  # a step that is ahead would run in the time of the other engine
    )


def _prefilled(engine: Engine, config: LlamaConfig, batch: int, prompt: int) -> Engine:
    """The engine once the prompts of all requests are computed and some steps have warmed it up."""
    draw = random.Random(0)
    requests = []
    for _ in range(batch):
        tokens = [draw.randrange(config.vocabulary) for _ in range(prompt)]
        room = engine.max_length - prompt
        requests.append(engine.submit(tokens, SamplingParams(max_tokens=room)))
    while not all(request.output for request in requests):
        engine.step()
    for _ in range(WARM_UP_STEPS):
        engine.step()
    return engine


def _decode_seconds(engines: dict[str, Engine], rounds: int) -> dict[str, float]:
    """Median time of a round of steps of each engine; each step ends with its tokens."""
    samples: dict[str, list[float]] = {name: [] for name in engines}
    for name in interleaved(engines, rounds):
        began = time.perf_counter()
        for _ in range(DECODE_STEPS):
            engines[name].step()
        samples[name].append(time.perf_counter() - began)
    return {name: statistics.median(values) for name, values in samples.items()}


def measure_training(
    config: LlamaConfig, spread: str, compiled: bool, mesh: DeviceMesh, rows: Rows, rounds: int
) -> None:
    """Tokens a second of training steps over the mesh, by our operators and by the stock ones."""
    stock = "compile" if compiled else "eager"
    torch.manual_seed(0)
    windows = torch.randint(config.vocabulary, (TRAINED_BATCH, config.sequence + 1)).to(
        mesh.device_type
    )
    if spread == "FSDP":
        windows = windows.chunk(mesh.size())[mesh.get_local_rank()]
    operators = {OURS: Operators.named("cudnn_ops"), stock: Operators.named("torch")}
    models = {
        impl: _training(config, given, spread, compiled, mesh) for impl, given in operators.items()
    }
    steps: dict[str, Step] = {
        impl: partial(training_step, model, windows) for impl, model in models.items()
    }
    verify_training(f"{spread}, {stock}", *(step_values(models[i], steps[i]) for i in steps))
    case = f"training, {spread}{', compiled' if compiled else ''}, {mesh.size()} GPUs"
    tokens = TRAINED_BATCH * config.sequence
    bound = _training(config, _attention_alone(), spread, False, mesh)
    timed: dict[str, Step] = {**steps, BOUND: partial(training_step, bound, windows)}
    for impl, seconds in step_seconds(timed, max(rounds // 4, 1)).items():
        rows.add(case, impl, "tokens_per_s", tokens / seconds)
    for impl, step in steps.items():
        rows.add(case, impl, "peak_mib", largest(peak_bytes(step)) / 2**20)
        models[impl].zero_grad()  # gradients are part of each peak


class _FirstOfTwo(torch.autograd.Function):
    """The first tensor as it is; both get its gradient, and so do the products before them."""

    @staticmethod
    def forward(ctx: Any, first: Tensor, second: Tensor) -> Tensor:
        return first.view_as(first)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad


def _attention_alone() -> Operators:
    """All but attention takes no time."""
    return Operators.named("cudnn_ops")._replace(
        rms_norm=lambda x, *_: x,
        add_rms_norm=lambda x, residual, *_: (x, residual),
        swiglu=_FirstOfTwo.apply,
        rotary_embedding_qk=lambda query, key, *_, **__: (query, key),
    )


def _training(
    config: LlamaConfig, operators: Operators, spread: str, compiled: bool, mesh: DeviceMesh
) -> Llama:
    torch.manual_seed(0)
    with torch.device(mesh.device_type):
        model = Llama(config, operators)
    model.to(torch.bfloat16)
    if spread == "tensor parallel":
        shard_tensors(model, mesh)
    if compiled:
        compile_blocks(model)
    if spread == "FSDP":
        shard_data(model, mesh)
    return model


def training_step(model: Llama, windows: Tensor) -> Sequence[Tensor]:
    model.zero_grad()
    loss = model.loss(windows)
    loss.backward()
    return (loss.detach(),)


def step_values(model: Llama, step: Step) -> tuple[float, float]:
    """The loss of a step and its gradients' norm, over all ranks."""
    (loss,) = step()
    norm = nn.utils.get_total_norm([w.grad for w in model.parameters() if w.grad is not None])
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    return largest(loss.item()), norm.item()


def verify_training(what: str, ours: tuple[float, float], stock: tuple[float, float]) -> None:
    """Raise if a step of our operators is not that of the stock ones."""
    for name, value, right in zip(("loss", "gradients' norm"), ours, stock, strict=True):
        if not abs(value - right) <= STEP_TOLERANCE * abs(right):
            raise RuntimeError(f"{what}: the {name} is {value:.5g}, by stock operators {right:.5g}")


def _allocated() -> int:
    return torch.cuda.memory_allocated()


def largest(value: float) -> float:
    """Over all ranks."""
    device = "cuda" if distributed.get_backend() == "nccl" else "cpu"
    everywhere = torch.tensor(value, dtype=torch.float64, device=device)
    distributed.all_reduce(everywhere, distributed.ReduceOp.MAX)
    return everywhere.item()


if __name__ == "__main__":
    if int(os.environ.get("RANK", "0")) > 0:
        as_rank((), Rows({}), rounds=0)  # rank 0 says what and how many, and writes the results
    else:
        main("distributed", run, run_part, PARTS)
