"""A paged cache and, beside it, what it should hold: every sequence's whole content in plain lists.

What is written for a token depends on all tokens up to it, as keys and values of a transformer do,
so that a page that is shared by mistake, at a wrong place or behind other tokens shows when it is
read back.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from cudnn_ops.serving import KVSequence, OutOfPages, PagedKVCache

HEAD_SIZE, VALUE_SIZE = 8, 4


def make_cache(pages: int, page_size: int = 4, **options: Any) -> PagedKVCache:
    """Two layers with one head of float32 on the CPU, unless said otherwise."""
    defaults: dict[str, Any] = {"value_size": VALUE_SIZE, "dtype": torch.float32, "device": "cpu"}
    return PagedKVCache(2, pages, page_size, 1, HEAD_SIZE, **(defaults | options))


def append(
    key_cache: Tensor,
    value_cache: Tensor,
    key: Tensor,
    value: Tensor,
    slot_mapping: Tensor,
    head_major: bool,
) -> None:
    """What paged_kv_append_ does, token by token."""
    size = key_cache.shape[2 if head_major else 1]
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            page, offset = divmod(slot, size)
            at = (page, slice(None), offset) if head_major else (page, offset)
            key_cache[at] = key[token]
            value_cache[at] = value[token]


def fingerprints(token_ids: Sequence[int]) -> list[int]:
    """One number a token, of all tokens up to it; float32 holds it exactly."""
    state, states = 1, []
    for token in token_ids:
        state = (state * 31_337 + token + 1) % 16_777_213
        states.append(state)
    return states


def write(cache: PagedKVCache, slots: list[int], states: list[int]) -> None:
    """Computes tokens: writes their fingerprints as keys and values of each layer."""
    device = cache.key_cache(0).device
    state = torch.tensor(states, dtype=torch.float32, device=device)[:, None, None]
    slot_mapping = torch.tensor(slots, dtype=torch.int64, device=device)
    for layer in range(cache.layers):
        key = (state + layer).repeat(1, 1, cache.head_size)
        value = (-state - layer).repeat(1, 1, cache.value_size)
        cache.append(layer, key, value, slot_mapping)


def grow(cache: PagedKVCache, sequence: KVSequence, token_ids: Sequence[int]) -> list[int]:
    """Extends a sequence to these tokens, of which it has the first; returns the new slots."""
    old = sequence.length
    slots = cache.extend(sequence, len(token_ids) - old)
    write(cache, slots, fingerprints(token_ids)[old:])
    return slots


def prefill(cache: PagedKVCache, token_ids: Sequence[int], *, commit: bool = True) -> KVSequence:
    """A new sequence of these tokens, computed where they are not there yet."""
    sequence = cache.allocate(token_ids)
    grow(cache, sequence, token_ids)
    if commit:
        cache.commit(sequence, token_ids)
    return sequence


def check(cache: PagedKVCache, contents: dict[KVSequence, list[int]]) -> None:
    """Reads every sequence back through its page table, and counts the pages.

    Args:
        cache: with these sequences and no other.
        contents: the tokens that each sequence should hold.
    """
    sequences = list(contents)
    lengths = [len(tokens) for tokens in contents.values()]
    assert cache.seq_lens(sequences).tolist() == lengths
    table = cache.page_table(sequences).long()
    states = [fingerprints(tokens) for tokens in contents.values()]
    width = table.shape[1] * cache.page_size
    expected = torch.tensor([row + [0] * (width - len(row)) for row in states]).float()
    there = torch.arange(width) < torch.tensor(lengths)[:, None]
    for layer in range(cache.layers if sequences else 0):
        for sign, pages in ((1, cache.key_cache(layer)), (-1, cache.value_cache(layer))):
            rows = pages[table].reshape(len(sequences), width, -1).cpu()  # of one head
            wrong = (rows != sign * (expected + layer)[..., None]).any(-1) & there
            assert not wrong.any(), f"layer {layer}, [sequence, token] {wrong.nonzero().tolist()}"
    _check_pages(cache, contents)


def _check_pages(cache: PagedKVCache, contents: dict[KVSequence, list[int]]) -> None:
    holders = Counter(page for sequence in contents for page in sequence.pages)
    size, pool, usage = cache.page_size, cache._pool, cache.usage()
    filled: dict[int, int] = {}
    for sequence, tokens in contents.items():
        assert len(set(sequence.pages)) == len(sequence.pages) == -(-len(tokens) // size)
        for index, page in enumerate(sequence.pages):
            filled[page] = max(filled.get(page, 0), min(size, len(tokens) - index * size))
    assert usage.pages == cache.pages == usage.free + usage.evictable + usage.in_use
    assert usage.in_use == len(holders)
    assert usage.shared == sum(count > 1 for count in holders.values())
    assert usage.sequences == len(contents)
    assert usage.tokens == sum(filled.values())
    assert sorted([*pool.free, *pool.evictable, *holders]) == list(range(cache.pages))
    assert pool.holders == [holders[page] for page in range(cache.pages)]

    # The tree: every page is where its node says, and children are evicted before their parents.
    nodes = list(pool._root.children.values())
    for node in nodes:
        assert pool.nodes[node.page] is node
        nodes += node.children.values()
    known = {node.page for node in nodes}
    assert known == {page for page, node in enumerate(pool.nodes) if node is not None}
    assert known >= set(pool.evictable)
    assert known.isdisjoint(pool.free)
    turn = {page: index for index, page in enumerate(pool.evictable)}
    for node in nodes:
        for child in node.children.values():
            assert turn.get(child.page, len(turn)) <= turn.get(node.page, len(turn))


def _common(a: list[int], b: list[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


class Walk:
    """Random steps with a cache; :attr:`contents` is what its sequences should hold."""

    def __init__(self, cache: PagedKVCache, seed: int, *, most: int = 7, words: int = 3) -> None:
        self.cache = cache
        self.random = random.Random(seed)
        self.most = most
        self.words = words
        self.contents: dict[KVSequence, list[int]] = {}
        self.said: dict[KVSequence, int] = {}  # full pages that were committed or found
        self.history: list[list[int]] = [[]]
        self.did: Counter[str] = Counter()

    def step(self) -> None:
        """One operation and a full check."""
        steps = {
            self.allocate: 3 if len(self.contents) < self.most else 0,
            self.fork: 2 if 0 < len(self.contents) < self.most else 0,
            self.extend: 5,
            self.truncate: 1.5,
            self.commit: 4,
            self.free: 1.5 if len(self.contents) > 1 else 0,
            self.discard: 0.5 if len(self.contents) > 1 else 0,
        }
        (step,) = self.random.choices(list(steps), list(steps.values()))
        if self.contents or step == self.allocate:
            step()
            check(self.cache, self.contents)
            self.did[step.__name__] += 1

    def tokens(self, count: int) -> list[int]:
        return [self.random.randrange(self.words) for _ in range(count)]

    def any(self) -> KVSequence:
        return self.random.choice(list(self.contents))

    def allocate(self) -> None:
        past = self.random.choice(self.history)
        prompt = past[: self.random.randint(0, len(past))] + self.tokens(self.random.randint(0, 9))
        for _ in range(self.random.choice([1, 1, 2])):  # two compute the same, unless it is known
            self.begin(prompt)

    def begin(self, prompt: list[int]) -> None:
        sequence = self.cache.allocate(prompt)
        size, shared = self.cache.page_size, sequence.length
        assert shared % size == 0
        assert shared == 0 or shared < len(prompt)
        # What a living sequence has said cannot have been evicted.
        for other, said in self.said.items():
            common = _common(self.contents[other][: said * size], prompt[:-1])
            assert shared >= common // size * size
        self.did["shared" if shared else "not shared"] += 1
        self.contents[sequence] = prompt[:shared]
        self.said[sequence] = shared // size
        check(self.cache, self.contents)  # of what was found, before anything is written
        self.grow([(sequence, prompt[shared:])])

    def fork(self) -> None:
        parent = self.any()
        tokens = self.contents[parent]
        length = self.random.choice([None, self.random.randint(0, len(tokens))])
        child = self.cache.fork(parent, length)
        self.contents[child] = tokens[:length]
        self.said[child] = min(self.said[parent], child.length // self.cache.page_size)

    def extend(self) -> None:
        batch = self.random.sample(list(self.contents), self.random.randint(1, len(self.contents)))
        most = self.random.choice([1, 1, 4, 9])
        self.grow([(one, self.tokens(self.random.randint(most == 1, most))) for one in batch])

    def grow(self, batch: list[tuple[KVSequence, list[int]]]) -> None:
        """Extends sequences by tokens, or holds that nothing has changed."""
        size, cache = self.cache.page_size, self.cache
        needed, writers = 0, Counter[int]()
        for one, tokens in batch:
            needed += -(-(one.length + len(tokens)) // size) - len(one.pages)
            if tokens and one.length % size:
                writers[one.pages[-1]] += 1
        for page, count in writers.items():
            holders = sum(page in other.pages for other in self.contents)
            needed += min(count, holders - 1)
        before = self.state()
        usage = cache.usage()
        known = {
            one.pages[-1] for one, _ in batch if one.pages and cache._pool.nodes[one.pages[-1]]
        }
        available = usage.free + usage.evictable
        try:
            slots = cache.extend_all([(one, len(tokens)) for one, tokens in batch])
        except OutOfPages as error:
            assert needed > available
            assert error.args == (needed, usage.free, usage.evictable, cache.pages)  # noqa: PT017
            assert self.state() == before
            self.did["out of pages"] += 1
            self.free()
            return
        assert needed <= available
        if usage.free < needed:
            self.did["evicted"] += 1
        states = []
        for one, tokens in batch:
            old = len(self.contents[one])
            if tokens and old % size and one.pages[old // size] in known:
                self.did["overwritten"] += 1
            self.contents[one] = self.contents[one] + tokens
            states += fingerprints(self.contents[one])[old:]
        write(cache, slots, states)

    def state(self) -> object:
        pages = {one: (one.length, one.pages) for one in self.contents}
        return pages, self.cache.usage(), list(self.cache._pool.evictable)

    def truncate(self) -> None:
        one = self.any()
        length = self.random.randint(max(0, one.length - 6), one.length)
        self.cache.truncate(one, length)
        self.contents[one] = self.contents[one][:length]
        self.said[one] = min(self.said[one], length // self.cache.page_size)

    def commit(self) -> None:
        one = self.any()
        length = self.random.choice([one.length, self.random.randint(0, one.length)])
        before = one.pages
        exchanged = self.cache.commit(one, self.contents[one][:length])
        assert exchanged == sum(a != b for a, b in zip(before, one.pages, strict=True))
        self.did["exchanged"] += exchanged
        full = length // self.cache.page_size
        if self.cache.prefix_sharing:
            if one._committed < full:  # only a fork can be in the way
                page = one.pages[one._committed]
                assert sum(page in other.pages for other in self.contents) > 1
                self.did["in the way"] += 1
            self.said[one] = max(self.said[one], min(one._committed, full))
        self.history = [*self.history[-20:], self.contents[one]]

    def free(self) -> None:
        one = self.any()
        self.cache.free(one)
        del self.contents[one], self.said[one]

    def discard(self) -> None:
        one = self.any()
        others = {page for each in self.contents if each is not one for page in each.pages}
        alone = [page for page in one.pages if page not in others]
        self.cache.discard(one)
        del self.contents[one], self.said[one]
        assert set(alone) <= set(self.cache._pool.free)
        for layer in range(self.cache.layers):
            assert not self.cache.key_cache(layer)[alone].any()
            assert not self.cache.value_cache(layer)[alone].any()
