"""The engine for coroutines: tokens, text, backpressure, errors that stay where they belong."""

from __future__ import annotations

import asyncio
import ctypes
import random
import threading

import pytest
import torch

from cudnn_ops.generation import Engine, SamplingParams
from cudnn_ops.server import AsyncEngine, Generation, QueueFull, RequestFailed, Stopped, Update
from tests.cases.generation import generate_alone, make_engine, make_model, make_prompts
from tests.cases.server import BAD, PAGES, Bytes, Tiny, make_tiny
from tests.conftest import DEVICES

pytestmark = pytest.mark.usefixtures("overlap")

LETTERS = list(b"abc")


async def collect(generation: Generation, updates: list[Update]) -> list[Update]:
    async for update in generation:
        updates.append(update)
    return updates


async def all_of(generation: Generation) -> list[Update]:
    return await collect(generation, [])


def text_of(updates: list[Update]) -> str:
    return "".join(update.text for update in updates)


async def settled(tiny: Tiny) -> None:
    """Waits until the thread has done what it was told."""
    for _ in range(6000):
        if not tiny.serving.unfinished:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"{tiny.serving.unfinished} requests are left")


@pytest.mark.parametrize("device", DEVICES)
def test_the_same_tokens_as_the_engine_alone(device):
    """Of forty coroutines that come when they like."""
    engine = make_engine(device, pages=40)
    prompts = make_prompts(40, engine.cache.page_size, seed=5)
    draw = random.Random(2)
    params = [
        SamplingParams(draw.randint(1, 9), draw.choice([0.0, 0.8]), seed=index, logprobs=1)
        for index in range(40)
    ]

    async def one(serving: AsyncEngine, index: int) -> list[Update]:
        await asyncio.sleep(draw.random() / 10)
        async with await serving.submit(prompts[index], params[index]) as generation:
            return await all_of(generation)

    async def main() -> list[list[Update]]:
        async with AsyncEngine(engine, vocabulary=64) as serving:
            assert serving.is_ready
            return await asyncio.gather(*(one(serving, index) for index in range(40)))

    results = asyncio.run(main())
    alone = make_engine(device, pages=40)
    requests = [alone.submit(*job) for job in zip(prompts, params, strict=True)]
    list(alone.run())
    model = make_model(device)
    for prompt, request, updates in zip(prompts, requests, results, strict=True):
        tokens = [token for update in updates for token in update.tokens]
        logprobs = [each for update in updates for each in update.logprobs]
        assert [each.token for each in logprobs] == tokens
        assert len(tokens) == request.params.max_tokens
        assert [update.finish_reason for update in updates[:-1]] == [None] * (len(updates) - 1)
        assert updates[-1].finish_reason == "length"
        assert text_of(updates) == ""  # no decode
        if device == "cpu":
            assert tokens == request.output
            if request.params.temperature == 0:
                assert tokens == generate_alone(model, prompt, len(tokens))
    assert engine.cache.usage().in_use == 0


@pytest.mark.parametrize("seed", range(5))
def test_text_is_that_of_the_request(seed):
    """Of random bytes: characters of several tokens, stops of several characters, slow readers."""
    draw = random.Random(seed)
    alphabet = "ab€😀é"
    tiny = make_tiny()
    # What follows is random; a reader that sleeps gets many tokens in one update.
    tiny.model.table.zero_()
    allowed = sorted({byte for letter in alphabet for byte in letter.encode()} | {3})
    params = [
        SamplingParams(
            60,
            temperature=1.0,
            seed=index,
            stop_strings=draw.choice([(), ("ab", "b€a"), ("bb", "abb"), ("\ufffd\ufffd\ufffd",)]),
            stop_tokens=draw.choice([(), (3,)]),
            min_tokens=draw.choice([0, 20]),
            allowed_tokens=lambda output: allowed,
        )
        for index in range(24)
    ]

    alone = make_tiny()
    alone.model.table.zero_()
    requests = [alone.engine.submit(LETTERS, each) for each in params]
    while alone.engine.running or alone.engine.waiting:
        alone.engine.step()
        assert all(request.text is not None for request in requests)  # read as it grows

    async def one(serving: AsyncEngine, each: SamplingParams) -> str:
        generation = await serving.submit(LETTERS, each)
        written, pause = "", draw.choice([0, 0, 0.01])
        async for update in generation:
            written += update.text
            await asyncio.sleep(pause)
        return written

    async def main() -> list[str]:
        async with tiny.serving as serving:
            return await asyncio.gather(*(one(serving, each) for each in params))

    results = asyncio.run(main())
    assert results == [request.text for request in requests]
    assert len(set(results)) > 12
    tiny.check_pages()


def test_a_slow_reader_gets_what_there_is_at_once():
    tiny = make_tiny()

    async def main() -> list[Update]:
        async with tiny.serving as serving:
            generation = await serving.submit(LETTERS, SamplingParams(20))
            await settled(tiny)
            return await all_of(generation)

    (update,) = asyncio.run(main())
    assert update.text == "defghijklmnopqrstuvw"
    assert len(update.tokens) == 20
    assert update.finish_reason == "length"


def test_a_full_queue():
    """Too many are refused at once; when there is room again, they are not."""
    tiny = make_tiny(max_waiting=2)
    assert tiny.serving.capacity == 6

    async def main() -> None:
        async with tiny.serving as serving:
            tiny.model.gate.clear()
            first = await serving.submit(LETTERS, SamplingParams(5))
            others = [asyncio.create_task(serving.submit(LETTERS)) for _ in range(5)]
            await asyncio.sleep(0.05)
            with pytest.raises(QueueFull, match="6 requests run or wait"):
                await serving.submit(LETTERS)
            tiny.model.gate.set()
            assert text_of(await all_of(first)) == "defgh"
            for other in others:
                (await other).abort()
            await settled(tiny)
            assert text_of(await all_of(await serving.submit(LETTERS, SamplingParams(2)))) == "de"

    asyncio.run(main())
    tiny.check_pages()


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], SamplingParams(), "prompt must have at least one token"),
        ([1, 256], SamplingParams(), "prompt must be of tokens from 0 to 255, .* got 256"),
        ([-1], SamplingParams(), "prompt must be of tokens from 0 to 255, .* got -1"),
        ([1] * 100, SamplingParams(29), "prompt and max_tokens are 100 \\+ 29 tokens"),
        ([1], SamplingParams(logit_bias={256: 1.0}), "logit_bias must be of tokens from 0 to 255"),
    ],
)
def test_requests_that_are_refused(prompt, params, message):
    tiny = make_tiny()

    async def main() -> None:
        async with tiny.serving as serving:
            other = await serving.submit(LETTERS, SamplingParams(10))
            with pytest.raises(ValueError, match=message):
                await serving.submit(prompt, params)
            assert text_of(await all_of(other)) == "defghijklm"

    asyncio.run(main())
    tiny.check_pages()


def test_a_request_that_fails_alone():
    """NaN, a function that raises, text that cannot be made; the others get what they asked for."""

    def raising(output: list[int]) -> None:
        if len(output) == 2:
            raise LookupError("no such state")

    tiny = make_tiny()

    async def main() -> None:
        async with tiny.serving as serving:
            good = [await serving.submit(LETTERS, SamplingParams(10)) for _ in range(3)]
            nan = await serving.submit([BAD], SamplingParams(10))
            sampled = await serving.submit([BAD], SamplingParams(10, temperature=1.0))
            lost = await serving.submit(LETTERS, SamplingParams(10, allowed_tokens=raising))
            for generation, why in ((nan, "are not finite"), (sampled, "are not finite")):
                with pytest.raises(RequestFailed, match=why):
                    await all_of(generation)
            updates: list[Update] = []
            with pytest.raises(RequestFailed, match="no such state") as failed:
                await collect(lost, updates)
            assert isinstance(failed.value.__cause__, LookupError)
            assert text_of(updates) == "de"
            for generation in good:
                assert text_of(await all_of(generation)) == "defghijklm"

    asyncio.run(main())
    assert tiny.engine.stats.failed == 3
    tiny.check_pages()


def test_text_that_cannot_be_made():
    tiny = make_tiny()

    def decode(tokens: list[int]) -> str:
        if ord("f") in tokens:
            raise KeyError("f")
        return Bytes().decode(tokens)

    serving = AsyncEngine(tiny.engine, decode=decode)

    async def main() -> None:
        async with serving:
            bad = await serving.submit(LETTERS, SamplingParams(10))
            good = await serving.submit(list(b"opq"), SamplingParams(10))
            with pytest.raises(RequestFailed, match="cannot be made: 'f'"):
                await all_of(bad)
            assert text_of(await all_of(good)) == "rstuvwxyza"

    asyncio.run(main())
    assert tiny.engine.cache.usage().in_use == 0


@pytest.mark.parametrize("device", DEVICES)
def test_nan_stays_in_its_request(device):
    """Its keys and values are NaN in pages that others get after it, and that prefixes share."""
    engine = make_engine(device, pages=12, max_batch=2)
    alone = make_engine(device, pages=12, max_batch=2)
    unit = engine.cache.page_size
    model = make_model(device)
    with torch.no_grad():
        model.embedding.weight[5] = torch.nan
        # The output projection is tied to it: the NaN is to be in the keys and values.
        projection = model.embedding.weight.nan_to_num()
    model.project = lambda x, weight: x @ projection.T
    engine = Engine(
        model.serve, engine.cache, max_batch=2, chunk=5 * unit, max_length=engine.max_length
    )
    good = [[7 + index] * unit + [9] * unit + [1, 2] for index in range(4)]
    bad = [[8] * unit + [5] * (2 * unit) + [1], [8] * unit + [5] * (2 * unit) + [2]]
    expected = [alone.submit(prompt, SamplingParams(unit)) for prompt in good]
    list(alone.run())

    async def main() -> None:
        async with AsyncEngine(engine) as serving:
            for prompt, request in zip(good, expected, strict=True):
                generations = [await serving.submit(each, SamplingParams(unit)) for each in bad]
                mine = await serving.submit(prompt, SamplingParams(unit))
                for generation in generations:
                    with pytest.raises(RequestFailed, match="not finite"):
                        await all_of(generation)
                tokens = [token for update in await all_of(mine) for token in update.tokens]
                assert tokens == request.output

    asyncio.run(main())
    assert engine.cache.usage().in_use == 0
    for layer in range(engine.cache.layers):
        assert engine.cache.key_cache(layer).isfinite().all()
        assert engine.cache.value_cache(layer).isfinite().all()


def test_a_step_that_fails():
    """Who takes part in it fails; who waits is served after it."""
    tiny = make_tiny(max_batch=2)

    async def main() -> None:
        async with tiny.serving as serving:
            tiny.model.gate.clear()
            generations = [await serving.submit(LETTERS, SamplingParams(5))]
            assert await asyncio.to_thread(tiny.model.held.wait, 60)  # that step has it alone
            tasks = [asyncio.create_task(serving.submit(LETTERS, SamplingParams(5))) for _ in "ab"]
            await asyncio.sleep(0.05)
            tiny.model.error = RuntimeError("the step is lost")
            tiny.model.gate.set()
            generations += [await task for task in tasks]
            results = await asyncio.gather(*map(all_of, generations), return_exceptions=True)
            lost = [result for result in results if isinstance(result, RequestFailed)]
            assert lost
            assert "the step is lost" in str(lost[0])
            assert all(text_of(each) == "defgh" for each in results if isinstance(each, list))
            assert serving.is_ready
            assert (
                text_of(await all_of(await serving.submit(LETTERS, SamplingParams(5)))) == "defgh"
            )

    asyncio.run(main())
    tiny.check_pages()


@pytest.mark.parametrize("fault", ["steps", "device", "thread"])
def test_an_engine_that_is_lost(fault):
    """Three failed steps in a row, a GPU that is gone, a thread that was killed: nobody waits."""
    tiny = make_tiny(max_batch=2)

    def failing(*args: object) -> None:
        raise RuntimeError("no step works")

    def lost(*args: object) -> None:
        raise torch.AcceleratorError("the GPU is gone")

    async def main() -> None:
        async with tiny.serving as serving:
            tiny.model.gate.clear()
            tasks = [asyncio.create_task(serving.submit(LETTERS, SamplingParams(90)))]
            tasks += [asyncio.create_task(serving.submit(LETTERS)) for _ in range(7)]
            await asyncio.sleep(0.05)
            if fault == "thread":
                thread = serving._thread
                assert thread is not None
                assert thread.ident is not None
                exit_ = ctypes.py_object(SystemExit)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), exit_)
            else:
                tiny.engine._runner._model = failing if fault == "steps" else lost
            tiny.model.gate.set()

            async def one(task: asyncio.Task[Generation]) -> list[Update]:
                return await all_of(await task)

            results = await asyncio.wait_for(
                asyncio.gather(*map(one, tasks), return_exceptions=True), 60
            )
            assert all(isinstance(each, RequestFailed | Stopped) for each in results)
            assert any(isinstance(each, Stopped) for each in results)
            assert not serving.is_ready
            assert serving.error is not None
            with pytest.raises(Stopped, match="the engine has failed"):
                await serving.submit(LETTERS)

    asyncio.run(main())
    tiny.check_pages()


def test_pages_that_somebody_else_holds():
    """Nothing is lost: the request goes on when they are free."""
    tiny = make_tiny(pages=16)
    cache = tiny.engine.cache
    theirs = cache.allocate()
    cache.extend(theirs, 15 * cache.page_size)

    async def main() -> None:
        async with tiny.serving as serving:
            generation = await serving.submit(LETTERS, SamplingParams(60))
            updates = [await anext(generation)]
            await asyncio.sleep(0.1)
            assert serving.is_ready
            # The thread waits between two steps: nothing else touches the cache.
            serving._order(lambda: cache.free(theirs))
            updates += await all_of(generation)
            assert len(text_of(updates)) == 60

    asyncio.run(main())
    tiny.check_pages()


@pytest.mark.parametrize("grace", [0.0, 60.0])
def test_stopping(grace):
    tiny = make_tiny()

    async def main() -> None:
        async with tiny.serving as serving:
            tiny.model.gate.clear()
            generation = await serving.submit(LETTERS, SamplingParams(100))
            stopping = asyncio.create_task(serving.stop(grace))
            await asyncio.sleep(0.05)
            assert not serving.is_ready
            with pytest.raises(Stopped, match="takes no more requests"):
                await serving.submit(LETTERS)
            tiny.model.gate.set()
            if grace:
                assert len(text_of(await all_of(generation))) == 100
            else:
                with pytest.raises(Stopped, match="this request's time is over"):
                    await all_of(generation)
            await stopping

    asyncio.run(main())
    tiny.check_pages()
    assert tiny.serving.error is None


def test_a_coroutine_that_is_cancelled_while_it_submits():
    tiny = make_tiny()

    async def main() -> None:
        async with tiny.serving as serving:
            tiny.model.gate.clear()
            first = await serving.submit(LETTERS, SamplingParams(5))
            assert await asyncio.to_thread(tiny.model.held.wait, 60)  # no order is taken now
            tasks = [asyncio.create_task(serving.submit(LETTERS)) for _ in range(10)]
            await asyncio.sleep(0.05)
            for task in tasks:
                task.cancel()
            assert all(
                isinstance(each, asyncio.CancelledError)
                for each in await asyncio.gather(*tasks, return_exceptions=True)
            )
            tiny.model.gate.set()
            assert text_of(await all_of(first)) == "defgh"
            await settled(tiny)

    asyncio.run(main())
    tiny.check_pages()


def test_a_thousand_aborts_at_random():
    """In a cache that is too small, of requests of every kind; not one page is missing."""
    tiny = make_tiny(pages=24, max_waiting=60, max_batch=6)
    draw = random.Random(7)
    counts = {"aborted": 0, "ended": 0, "failed": 0, "cancelled": 0}

    async def one(serving: AsyncEngine, gate: asyncio.Semaphore) -> None:
        prompt = [draw.randrange(256) for _ in range(draw.randint(1, 40))]
        if draw.random() < 0.1:
            prompt[-1] = BAD
        params = SamplingParams(
            draw.randint(1, 60),
            draw.choice([0.0, 1.0]),
            seed=draw.randrange(100),
            stop_strings=draw.choice([(), ("k", "qr")]),
            presence_penalty=draw.choice([0.0, 1.0]),
            logprobs=draw.choice([None, 2]),
        )
        patience = draw.choice([0, 1, 3, 20, 1000])
        async with gate:
            task = asyncio.create_task(serving.submit(prompt, params))
            if draw.random() < 0.2:
                await asyncio.sleep(0)
                task.cancel()
            try:
                async with await task as generation:
                    async for _ in generation:
                        patience -= 1
                        if patience < 0:
                            counts["aborted"] += 1
                            break
                    else:
                        counts["ended"] += 1
            except asyncio.CancelledError:
                counts["cancelled"] += 1
            except RequestFailed:
                counts["failed"] += 1

    async def main() -> None:
        async with tiny.serving as serving:
            gate = asyncio.Semaphore(40)
            # How many end before they are aborted depends on how busy the machine is.
            while counts["aborted"] + counts["cancelled"] < 1000:
                await asyncio.gather(*(one(serving, gate) for _ in range(500)))
            await settled(tiny)
            tiny.check_pages()
            assert (
                text_of(await all_of(await serving.submit(LETTERS, SamplingParams(5)))) == "defgh"
            )

    asyncio.run(main())
    tiny.check_pages()
    assert min(counts.values()) > 20
    assert tiny.engine.stats.preemptions > 0


def test_it_must_be_started_and_only_once():
    tiny = make_tiny()

    async def main() -> None:
        with pytest.raises(Stopped, match="was not started"):
            await tiny.serving.submit(LETTERS)
        async with tiny.serving:
            pass
        with pytest.raises(RuntimeError, match="started once"):
            await tiny.serving.__aenter__()
        with pytest.raises(Stopped, match="takes no more requests"):
            await tiny.serving.submit(LETTERS)

    asyncio.run(main())
    assert not [thread for thread in threading.enumerate() if thread.name == "cudnn_ops engine"]


@pytest.mark.parametrize(
    "options", [{"vocabulary": 0}, {"vocabulary": 2.5}, {"max_waiting": -1}], ids=str
)
def test_options_out_of_range(options):
    with pytest.raises(ValueError, match="must be a whole number"):
        AsyncEngine(make_tiny(pages=PAGES).engine, **options)
