"""The engine on several ranks against one without: what each process of a group checks."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from cudnn_ops import OutOfPages, PagedKVCache
from cudnn_ops.distributed import heads_of_rank
from cudnn_ops.generation import (
    Attend,
    DraftModel,
    Engine,
    EngineStats,
    PromptLookup,
    Request,
    SamplingParams,
)
from cudnn_ops.serving.batch import Batch
from examples.llama import Llama, LlamaConfig, Operators
from examples.parallel import shard_for_serving
from tests.cases.generation import check_likeliest, make_prompts, serve_at_random
from tests.distributed.processes import device, mesh_of

CONFIG = LlamaConfig(2, 64, 8, 4, sequence=96, vocabulary=64)
#: On a GPU, where there is no attention in float64.
CONFIG_CUDA = LlamaConfig(2, 512, 8, 4, sequence=384, vocabulary=64)

Script = Callable[[Engine], list[Request]]


def is_exact() -> bool:
    """Whether ranks compute in float64, in which the order of sums changes no token."""
    return device().type == "cpu"


def unit() -> int:
    """Tokens of a page."""
    return 4 if is_exact() else 16


class Served:
    """An engine with a tiny Llama, and what can be seen of its steps."""

    overlap = False
    """Of all engines that are created, on all ranks."""

    def __init__(
        self,
        mesh: DeviceMesh | None,
        kv_heads: int = 4,
        pages: int = 40,
        **options: Any,
    ) -> None:
        config = replace(CONFIG if is_exact() else CONFIG_CUDA, kv_heads=kv_heads)
        dtype = torch.float64 if is_exact() else torch.bfloat16
        torch.manual_seed(0)
        self.model = Llama(config, Operators.named("torch"))
        for weight in self.model.parameters():
            weight.data = (weight if weight.dim() == 1 else 3 * weight).detach().to(dtype)
        self.model.to(device())
        if mesh is not None:
            shard_for_serving(self.model, mesh)
            _, kv_heads = heads_of_rank(config.heads, config.kv_heads, mesh)
        cache = PagedKVCache(
            *(config.layers, pages, unit(), kv_heads, config.head_size),
            dtype=dtype,
            device=device(),
        )
        common = {"max_batch": 6, "chunk": 5 * unit(), "mesh": mesh, "overlap": self.overlap}
        options = common | options
        if callable(options.get("speculation")):
            options["speculation"] = options["speculation"](mesh)
        self.logits: list[Tensor] = []
        self.engine = Engine(self.serve, cache, max_length=config.sequence, **options)
        self.released: list[list[int]] = []  # of requests that gave back their pages
        self.pages: list[tuple[int, ...]] = []  # and slots, at each step
        self._watch(self.engine)

    def serve(self, tokens: Tensor, positions: Tensor, last: Tensor, attend: Attend) -> Tensor:
        logits = self.model.serve(tokens, positions, last, attend)
        if is_exact():
            self.logits.append(logits.clone())
        return logits

    def run(self, script: Script) -> list[Request]:
        """Serves the script's requests, and gives them on the rank that leads."""
        with self.engine as engine:
            if engine.is_leader:
                return script(engine)
            engine.follow()
        return []

    def counters(self) -> EngineStats:
        return replace(self.engine.stats, seconds=0.0)

    def _watch(self, engine: Engine) -> None:
        scheduler = engine._scheduler
        schedules, release = (scheduler.schedule, scheduler.schedule_ahead), scheduler._release

        def recorded(schedule: Callable[..., Batch | None], *before: Batch) -> Batch | None:
            batch = schedule(*before)
            usage = engine.cache.usage()
            slots = batch.slots if batch else []
            self.pages.append((usage.free, usage.evictable, usage.shared, *slots))
            return batch

        def released(request: Request) -> None:
            self.released.append(request.output)
            release(request)

        now, ahead = (partial(recorded, schedule) for schedule in schedules)
        scheduler.schedule = now  # type: ignore[assignment, method-assign]
        scheduler.schedule_ahead = ahead  # type: ignore[method-assign]
        scheduler._release = released  # type: ignore[method-assign]


def on_all(mesh: DeviceMesh | ProcessGroup, value: Any) -> list[Any]:
    """What each rank of a mesh has."""
    group = mesh.get_group() if isinstance(mesh, DeviceMesh) else mesh
    values: list[Any] = [None] * group.size()
    distributed.all_gather_object(values, value, group=group)
    return values


def check_equal(mesh: DeviceMesh, script: Script, kv_heads: int = 4, **options: Any) -> EngineStats:
    """All ranks serve a script as one process does: tokens, logits, pages and counters."""
    ours, alone = (Served(m, kv_heads, **options) for m in (mesh, None))
    requests = ours.run(script)
    expected = alone.run(script)
    seen = on_all(mesh, (ours.released, ours.pages, ours.counters()))
    assert seen == seen[:1] * mesh.size()
    assert not ours.engine._runner._graphs  # or NCCL would wait for them in the end
    usage = ours.engine.cache.usage()
    assert usage.in_use == usage.sequences == 0
    assert ours.engine.running == ours.engine.waiting == 0
    assert ours.engine._queued is None
    assert (ours.engine.stats.overlapped > 0) == ours.engine.overlap
    if not is_exact():
        # Where two tokens are as likely, rounding decides, and all that follows is another text.
        plain = [one for one in requests if is_plain(one.params) and one.output]
        check_likeliest(alone.model, plain)
        return ours.engine.stats
    if ours.engine.is_leader:
        assert outputs_of(requests) == outputs_of(expected)
    assert ours.released == alone.released
    assert ours.counters() == alone.counters()
    assert ours.pages == alone.pages
    for logits, right in zip(ours.logits, alone.logits, strict=True):
        torch.testing.assert_close(logits, right, rtol=0.0, atol=1e-9)
    return ours.engine.stats


def outputs_of(requests: list[Request]) -> list[list[int]]:
    return [request.output for request in requests]


def is_plain(params: SamplingParams) -> bool:
    """Whether each token is the likeliest one, whatever there was before."""
    return replace(params, seed=None, top_k=0) == SamplingParams(params.max_tokens)


def jobs_of(count: int, seed: int, **params: Any) -> list[tuple[list[int], SamplingParams]]:
    draw = random.Random(seed)
    return [
        (prompt, SamplingParams(max_tokens=draw.randint(1, 5 * unit()), **params))
        for prompt in make_prompts(count, unit(), seed)
    ]


def check_greedy(mesh: DeviceMesh) -> None:
    """Requests that come when they like, with common beginnings and too few pages."""
    jobs = jobs_of(24, 1)
    # With one head, all ranks have it; with as many as there are ranks, each has one.
    for kv_heads in (mesh.size(), 1):
        stats = check_equal(mesh, lambda e: serve_at_random(e, jobs), kv_heads, pages=26)
        assert stats.preemptions > 0
        assert stats.prefix_hits > 0
        assert stats.finished == 24


def check_sampling(mesh: DeviceMesh) -> None:
    jobs = [
        (prompt, replace(params, seed=index, top_k=index % 3 * 5, top_p=1 - index % 2 / 5))
        for index, (prompt, params) in enumerate(jobs_of(8, 2, temperature=0.9))
    ]
    check_equal(mesh, lambda e: serve_at_random(e, jobs))
    # Without seeds another engine gives other tokens, and all ranks the same ones.
    served = Served(mesh)

    def unseeded(engine: Engine) -> list[Request]:
        engine.warm_up()
        return serve_at_random(engine, jobs_of(6, 3, temperature=2.0))

    served.run(unseeded)
    outputs = on_all(mesh, served.released)
    assert len(outputs[0]) >= 6
    assert outputs == outputs[:1] * mesh.size()


def check_options(mesh: DeviceMesh) -> None:
    """Options of every kind: the first rank alone calls the functions, some of which fail."""
    calls: list[int] = []

    def decode(tokens: list[int]) -> str:
        calls.append(len(tokens))
        return "".join(f"{token:02d}" for token in tokens)

    def allowed(output: list[int]) -> range | tuple[()]:
        calls.append(len(output))
        return range(3, 50) if len(output) < 7 else ()

    kinds: list[dict[str, Any]] = [
        {},
        {"frequency_penalty": 0.5, "repetition_penalty": 1.3, "logprobs": 2},
        {"allowed_tokens": allowed},
        {"stop_strings": ["3", "41"], "min_tokens": 3},
        {"stop_sequences": [[token] for token in range(0, 64, 9)], "temperature": 1.5},
        {"bad_words": [[1], [2, 3]], "stop_tokens": {4, 5}, "temperature": 1.5, "min_p": 0.1},
    ]
    jobs = [
        (prompt, replace(params, max_tokens=4 * unit(), seed=index, **kinds[index % len(kinds)]))
        for index, (prompt, params) in enumerate(jobs_of(24, 6))
    ]
    stats = check_equal(mesh, lambda e: serve_at_random(e, jobs), pages=26, decode=decode)
    assert stats.failed > 0
    assert stats.failed + stats.finished == 24
    assert stats.preemptions > 0
    first, *others = on_all(mesh, len(calls))
    if is_exact():  # all of them served it alone as well
        assert others == [first // 2] * len(others)
    assert first > 100


def check_speculation(mesh: DeviceMesh) -> None:
    """All ranks propose the same drafts, and keep what the first one accepts."""
    fours = unit() // 4
    phrases = [[draw % 7, draw % 5, 3, 9] * 3 * fours for draw in range(16)]
    jobs = [
        (phrase, SamplingParams((5 + i) * fours, temperature=i % 3 / 2, seed=i, top_k=5))
        for i, phrase in enumerate(phrases)
    ]
    for speculation in (PromptLookup(3, 2, 1), PromptLookup(1, 1, 1)):
        options: dict[str, Any] = {"pages": 26, "speculation": speculation}
        stats = check_equal(mesh, lambda e: serve_at_random(e, jobs), **options)
        assert stats.finished == 16
        assert stats.preemptions > 0
        assert 0 < stats.speculation.accepted_tokens < stats.speculation.draft_tokens


def check_draft_model(mesh: DeviceMesh) -> None:
    """The first rank alone runs the draft model, whole, and all of them verify the same drafts."""
    calls: list[int] = []

    def speculation(mesh: DeviceMesh | None) -> DraftModel:
        if mesh is not None and mesh.get_local_rank() > 0:
            return DraftModel(None, None, 3)
        # The engine's model without its mesh; what it says is shifted at some of the positions.
        draft = Served(None)

        def serve(tokens: Tensor, positions: Tensor, last: Tensor, attend: Attend) -> Tensor:
            calls.append(len(tokens))
            logits = draft.model.serve(tokens, positions, last, attend)
            return torch.where((positions[last] % 4 == 0)[:, None], logits.roll(1, 1), logits)

        return DraftModel(serve, draft.engine.cache, 3)

    jobs = [
        (prompt, replace(params, temperature=index % 3 / 2, seed=index, top_k=9))
        for index, (prompt, params) in enumerate(jobs_of(24, 1))
    ]
    options: dict[str, Any] = {"pages": 22, "speculation": speculation}
    stats = check_equal(mesh, lambda e: serve_at_random(e, jobs), **options)
    assert stats.finished == 24
    assert stats.preemptions > 0
    assert 0 < stats.speculation.accepted_tokens < stats.speculation.draft_tokens
    first, *others = on_all(mesh, len(calls))
    if is_exact():  # all of them served it alone as well
        assert others == [first // 2] * len(others)


def check_aborts(mesh: DeviceMesh) -> None:
    """Of requests that run, wait, are in their prompt, or have not been told of; and of none."""

    def script(engine: Engine) -> list[Request]:
        long = SamplingParams(max_tokens=30)
        prompts = make_prompts(9, unit(), seed=4)
        prompts[2] = prompts[2] + [1] * (7 * unit())
        requests = [engine.submit(prompt, long) for prompt in prompts]
        engine.abort(requests[4])
        engine.step()
        engine.abort(requests[0])
        for _ in range(3):
            engine.step()
        engine.abort(requests[2])
        engine.abort(requests[8])
        for _ in engine.run():
            pass
        engine.abort(requests[1])
        return [request for request in requests if request.output]

    stats = check_equal(mesh, script, max_batch=3)
    assert stats.aborted == 4
    assert stats.finished == 5


def check_priorities(mesh: DeviceMesh) -> None:
    """The first rank tells who comes first, and who was late: running, waiting, and untold."""

    def script(engine: Engine) -> list[Request]:
        long = SamplingParams(max_tokens=20)
        prompts = make_prompts(8, unit(), seed=4)
        requests = [engine.submit(prompt, long, priority=-1, timeout=1e6) for prompt in prompts[:4]]
        for _ in range(6):
            engine.step()
        for index, prompt in enumerate(prompts[4:]):
            requests.append(engine.submit(prompt, long, priority=index, timeout=1e6))
        engine.step()
        running = [request for request in requests if request.sequence is not None]
        waiting = [request for request in requests if request.sequence is None]
        for request in (running[0], waiting[0], engine.submit([3], long, timeout=1e6)):
            request._timeout = 0.0
        for _ in engine.run():
            pass
        return requests

    stats = check_equal(mesh, script, max_batch=3)
    assert (stats.timed_out, stats.finished) == (3, 6)
    assert stats.preemptions > 0


def check_swapping(mesh: DeviceMesh) -> None:
    """All ranks copy the same pages to their hosts and back, by what the first one measured."""
    jobs = jobs_of(24, 1)
    for policy in ("swap", "auto"):
        size = 40 * unit() * 4 * 2 * 2 * 64 * 8  # more than all pages
        options: dict[str, Any] = {"pages": 26, "preemption": policy, "swap_bytes": size}
        ours = Served(mesh, **options)
        if policy == "auto" and ours.engine._swapper and ours.engine.is_leader:
            # Rates in whose light some requests are swapped.
            ours.engine._swapper._computing.extend([1000.0] * 9)
            ours.engine._swapper.space.rates.extend([40 * 2**20] * 9)
        requests = ours.run(lambda e: serve_at_random(e, jobs))
        seen = on_all(mesh, (ours.released, ours.pages, ours.counters()))
        assert seen == seen[:1] * mesh.size()
        expected = Served(None, pages=200).run(lambda e: serve_at_random(e, jobs))
        if ours.engine.is_leader and is_exact():
            assert outputs_of(requests) == outputs_of(expected)
        assert ours.engine._swapper is not None
        assert ours.engine._swapper.used == 0
        assert ours.engine.cache.usage().in_use == 0
        if policy == "swap":
            assert ours.engine.stats.swaps == ours.engine.stats.preemptions > 0
            assert ours.engine.stats.restored_tokens > 0


def check_missing_pages(mesh: DeviceMesh) -> None:
    """The first rank is told of pages that something else holds, and all of them go on."""
    served = Served(mesh, pages=6)
    cache = served.engine.cache
    other = cache.allocate()
    cache.extend(other, 4 * unit())

    def script(engine: Engine) -> list[Request]:
        request = engine.submit([1] * unit(), SamplingParams(max_tokens=2 * unit()))
        with pytest.raises(OutOfPages):
            list(engine.run())
        assert request.output
        with pytest.raises(OutOfPages):
            engine.step()
        engine.abort(request)
        late = engine.submit([2, 3], SamplingParams(max_tokens=3))
        assert list(engine.run()) == [late]
        assert engine.step() == []
        return [late]

    served.run(script)
    cache.free(other)
    assert set(on_all(mesh, cache.usage().in_use)) == {0}
    # A closed engine goes on, with nothing in its cache if all ranks say so.
    cache.reset()
    served.run(lambda engine: [engine.submit([1] * 9, SamplingParams(2)), *engine.run()])
    steps = on_all(mesh, served.counters())
    assert steps == steps[:1] * mesh.size()
    assert steps[0].finished == 2


def check_heads_that_cannot_be_shared(mesh: DeviceMesh) -> None:
    size = mesh.size()
    assert heads_of_rank(8, 4, mesh) == (8 // size, 4 // size)
    assert heads_of_rank(8, 1, mesh) == (8 // size, 1)
    message = rf"heads_of_rank: {size} ranks cannot share 3 key heads evenly, .* that divides 3"
    with pytest.raises(ValueError, match=message):
        heads_of_rank(6, 3, mesh)
    with pytest.raises(ValueError, match=f"{size} ranks cannot share {size + 1} heads evenly"):
        heads_of_rank(size + 1, 1, mesh)
    with pytest.raises(ValueError, match=r"heads must be a multiple of heads_kv, .* got 4 and 3"):
        heads_of_rank(4, 3, mesh)


def check_ranks_that_differ(mesh: DeviceMesh) -> None:
    rank = mesh.get_local_rank()
    message = rf"Engine: max_batch is 6 on rank 0 and 5 on rank {mesh.size() - 1}; all ranks must"
    with pytest.raises(ValueError, match=message):
        Served(mesh, max_batch=5 if rank == mesh.size() - 1 else 6)
    message = r"speculation is None on rank 0 and PromptLookup\(.*\) on rank 1; all"
    with pytest.raises(ValueError, match=message):
        Served(mesh, speculation=PromptLookup() if rank == 1 else None)
    with pytest.raises(ValueError, match="overlap is False on rank 0 and True on rank 1; all"):
        Served(mesh, overlap=rank == 1)
    with pytest.raises(ValueError, match=r"cache\.pages is 40 on rank 0 and 41 on rank 1; all"):
        Served(mesh, pages=41 if rank == 1 else 40)


def check_who_is_called(mesh: DeviceMesh) -> None:
    """Requests are for the first rank, following is for the others."""
    engine = Served(mesh).engine
    size, rank = mesh.size(), mesh.get_local_rank()
    if engine.is_leader:
        with pytest.raises(RuntimeError, match=r"Engine\.follow: this rank is the first one"):
            engine.follow()
        engine.close()
        return
    calls: dict[str, Callable[[], Any]] = {
        "submit": lambda: engine.submit([1]),
        "step": engine.step,
        "warm_up": engine.warm_up,
        "abort": lambda: engine.abort(Request([1], SamplingParams(), 0)),
    }
    for name, call in calls.items():
        message = rf"Engine\.{name}: rank {rank} of {size} follows rank 0, .* call follow\(\) here"
        with pytest.raises(RuntimeError, match=message):
            call()
    engine.close()  # as on leaving `with`
    engine.follow()


def check_closing(mesh: DeviceMesh) -> None:
    """No rank keeps a CUDA graph, also where the first one fails."""
    for fails in (False, True):
        served = Served(mesh)
        graphs = served.engine._runner._graphs
        graphs[1, 1] = None  # type: ignore[assignment]  # on a CPU there are none

        def script(engine: Engine, fails: bool = fails) -> list[Request]:
            request = engine.submit([1, 2], SamplingParams(3))
            assert list(engine.run()) == [request]
            if fails:
                raise KeyError
            return [request]

        is_told = fails and served.engine.is_leader
        with pytest.raises(KeyError) if is_told else nullcontext():
            served.run(script)
        assert not graphs


def check_caches_that_differ(mesh: DeviceMesh) -> None:
    """A rank whose cache is not like the first one's says so, and the others name its silence."""
    served = Served(impatient(mesh))
    engine = served.engine
    served.run(lambda e: [e.submit([1] * 3 * unit(), SamplingParams(1)), *e.run()])
    if mesh.get_local_rank() == 1:
        engine.cache.reset()
        with pytest.raises(RuntimeError, match=r"rank 1 of 2 has State\(free=40, .*free=37, evic"):
            engine.follow()
    else:
        engine.submit([1] * 3 * unit(), SamplingParams(1))
        with pytest.raises(RuntimeError) as raised:
            engine.step()
        check_named(raised.value, "rank 0 of 2 gave up while computing a step")
    distributed.barrier(mesh.get_group())


def check_a_rank_that_never_calls(mesh: DeviceMesh) -> None:
    rank = mesh.get_local_rank()
    for caller, doing in (
        (0, "rank 0 of 2 gave up while telling the other ranks to go on, which must be in follow"),
        (1, r"rank 1 of 2 gave up while waiting for rank 0 to call step() or close()"),
    ):
        engine = Served(impatient(mesh)).engine
        if rank == caller:
            with pytest.raises(RuntimeError) as raised:
                engine.step() if rank == 0 else engine.follow()
            check_named(raised.value, doing)
        distributed.barrier(mesh.get_group())
    alone = impatient(mesh)
    if rank == 0:
        with pytest.raises(RuntimeError) as raised:
            Served(alone)
        check_named(raised.value, "rank 0 of 2 gave up while joining the other ranks")
    distributed.barrier(mesh.get_group())


def impatient(mesh: DeviceMesh) -> DeviceMesh:
    """The same ranks, which wait for each other for three seconds."""
    ranks = distributed.get_process_group_ranks(mesh.get_group())
    group = distributed.new_group(
        ranks, timeout=timedelta(seconds=3), use_local_synchronization=True
    )
    assert isinstance(group, ProcessGroup)
    return DeviceMesh.from_group(group, mesh.device_type)


def check_named(error: RuntimeError, text: str) -> None:
    assert str(error).startswith("cudnn_ops.generation.Engine: " + text), error
    assert "timeout of torch.distributed.init_process_group or new_group" in str(error)


def check_overlapped(mesh: DeviceMesh) -> None:
    """Steps that are queued before the ranks that follow are told the tokens."""
    Served.overlap = True
    for check in (
        check_greedy,
        check_sampling,
        check_options,
        check_aborts,
        check_priorities,
        check_swapping,
        check_missing_pages,
    ):
        check(mesh)
    Served.overlap = False


def check_pairs_and_all() -> None:
    """Two meshes of two ranks beside each other, then one of four."""
    both = mesh_of(2, 2, names=("dp", "tp"))
    with pytest.raises(ValueError, match=r"rank: mesh has 2 dimensions, .* as in mesh\['tp'\]"):
        heads_of_rank(8, 4, both)
    pair = both["tp"]
    check_overlapped(pair)
    for check in (
        check_greedy,
        check_sampling,
        check_options,
        check_speculation,
        check_draft_model,
        check_aborts,
        check_priorities,
        check_swapping,
        check_missing_pages,
        check_heads_that_cannot_be_shared,
        check_ranks_that_differ,
        check_who_is_called,
        check_closing,
        check_caches_that_differ,
        check_a_rank_that_never_calls,
    ):
        check(pair)
    distributed.barrier()
    whole = mesh_of()
    with pytest.raises(ValueError, match="4 ranks cannot share 2 key heads evenly"):
        Served(whole, kv_heads=2)
    check_greedy(whole)
    check_aborts(whole)


def check_on_gpus(overlaps: bool) -> None:
    """What GPUs have of their own: NCCL, graphs, streams and pinned memory.

    The rest is the host's work, the same as on CPUs; here it takes minutes beside other processes.
    """
    mesh = mesh_of()
    Served.overlap = overlaps
    checks = (check_greedy, check_sampling, check_speculation, check_draft_model)
    for check in (check_greedy, check_aborts, check_swapping) if overlaps else checks:
        check(mesh)
