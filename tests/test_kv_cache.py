"""The paged cache of keys and values: pages, sharing, eviction, contents."""

from __future__ import annotations

import gc
import itertools
import pickle
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import cudnn_ops
from cudnn_ops import CacheUsage, KVSequence, OutOfPages, PagedKVCache
from cudnn_ops.serving import memory
from tests.cases import kv_cache as cases
from tests.cases.kv_cache import check, grow, make_cache, prefill
from tests.conftest import DEVICES

LAYOUTS = ["NHD", "HND"]
OPERATOR = memory._append

ABC = list(range(100, 112))  # three pages of four tokens


@pytest.fixture(autouse=True)
def plain_append(monkeypatch):
    """These tests are of the host's part: keys and values are written by plain indexing."""
    monkeypatch.setattr(memory, "_append", cases.append)


def free_and_evictable(cache: PagedKVCache) -> tuple[int, int]:
    usage = cache.usage()
    return usage.free, usage.evictable


class NoOperators(TorchDispatchMode):
    """Counts the operators that torch runs inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ran.append(str(func))
        return func(*args, **(kwargs or {}))


# Memory


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_one_allocation_holds_all_layers(layout, dtype):
    cache = PagedKVCache(3, 5, 4, 2, 24, value_size=8, dtype=dtype, device="cpu", kv_layout=layout)
    rows = (4, 2) if layout == "NHD" else (2, 4)
    spans = []
    for layer in range(3):
        for tensor, size in ((cache.key_cache(layer), 24), (cache.value_cache(layer), 8)):
            assert tensor.shape == (5, *rows, size)
            assert tensor.dtype == dtype
            assert tensor.is_contiguous()
            start = tensor.storage_offset() * dtype.itemsize
            assert start % 256 == 0
            assert tensor.untyped_storage().data_ptr() == (
                cache.key_cache(0).untyped_storage().data_ptr()
            )
            assert not tensor.float().any()
            spans.append((start, start + tensor.numel() * dtype.itemsize))
    spans.sort()
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    assert cache.key_cache(1) is cache.key_cache(1)


def test_values_are_as_long_as_keys_by_default():
    cache = PagedKVCache(1, 2, 4, 3, 16, dtype=torch.float16, device="cpu")
    assert cache.value_cache(0).shape == cache.key_cache(0).shape == (2, 4, 3, 16)


def test_a_cache_made_in_inference_mode_is_written_to_outside_of_it():
    with torch.inference_mode():
        cache = make_cache(4)
        first = prefill(cache, ABC[:6])
    second = cache.fork(first)
    grow(cache, second, ABC[:7])
    with torch.inference_mode():
        grow(cache, first, ABC[:8])
    check(cache, {first: ABC[:8], second: ABC[:7]})


def test_the_memory_goes_with_the_cache():
    """Not when the garbage collector gets to it: sequences that are left do not hold it."""
    cache = make_cache(4)
    left = prefill(cache, ABC[:6])
    gone = weakref.ref(cache)
    gc.disable()
    try:
        del cache
        assert gone() is None
    finally:
        gc.enable()
    assert left.length == 6


# Sequences


def test_slots_are_pages_and_offsets():
    cache = make_cache(6)
    a, b = cache.allocate(), cache.allocate()
    assert cache.extend(a, 3) == [0, 1, 2]
    assert cache.extend(b, 5) == [4, 5, 6, 7, 8]
    assert cache.extend(a, 6) == [3, 12, 13, 14, 15, 16]
    assert (a.length, a.pages) == (9, (0, 3, 4))
    assert (b.length, b.pages) == (5, (1, 2))
    assert cache.slots(a, 2, 6) == [2, 3, 12, 13]
    assert cache.slots(a, 9, 9) == []
    assert cache.extend(a, 0) == []
    assert a.length == 9
    assert repr(b) == "KVSequence(length=5, pages=[1, 2])"


def test_handles_are_equal_to_themselves_only():
    cache = make_cache(2)
    assert len({cache.allocate(), cache.allocate()}) == 2
    with pytest.raises(AttributeError):
        cache.allocate().length = 3


def test_extend_all_gives_the_slots_one_behind_the_other():
    cache = make_cache(6)
    a, b, c = (cache.allocate() for _ in range(3))
    cache.extend(b, 3)
    assert cache.extend_all([(a, 2), (b, 3), (c, 0)]) == [4, 5, 3, 8, 9]
    assert [one.length for one in (a, b, c)] == [2, 6, 0]
    assert cache.extend_all([]) == []


def test_extending_runs_no_operator():
    cache = make_cache(40)
    sequences = [cache.allocate() for _ in range(5)]
    with NoOperators() as mode:
        for _ in range(20):
            cache.extend_all([(one, 1) for one in sequences])
    assert mode.ran == []


def test_truncate_lets_go_of_pages():
    cache = make_cache(6)
    one = prefill(cache, ABC, commit=False)
    cache.truncate(one, 12)
    assert free_and_evictable(cache) == (3, 0)
    cache.truncate(one, 5)
    assert one.length == 5
    assert len(one.pages) == 2
    assert free_and_evictable(cache) == (4, 0)
    other = [*ABC[:5], 7, 8]
    grow(cache, one, other)
    check(cache, {one: other})
    cache.truncate(one, 0)
    assert one.pages == ()
    assert free_and_evictable(cache) == (6, 0)


def test_free_ends_a_sequence():
    cache = make_cache(4)
    one = prefill(cache, ABC[:7], commit=False)
    cache.free(one)
    assert free_and_evictable(cache) == (4, 0)
    assert (one.length, one.pages) == (0, ())
    assert repr(one).endswith("freed)")


# Forks: copy on write


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("first", ["parent", "child"])
def test_whoever_of_a_fork_writes_first_gets_a_copy(layout, first):
    cache = make_cache(6, kv_layout=layout)
    parent = prefill(cache, ABC[:6], commit=False)
    child = cache.fork(parent)
    shared = parent.pages
    assert child.pages == shared
    assert cache.usage().shared == 2
    order = [parent, child] if first == "parent" else [child, parent]
    contents = {parent: ABC[:6], child: ABC[:6]}
    for token, one in enumerate(order):
        contents[one] = [*ABC[:6], token]
        grow(cache, one, contents[one])
        check(cache, contents)
    assert order[0].pages[0] == shared[0]
    assert order[0].pages[1] not in shared
    assert order[1].pages == shared  # nobody else had it any more
    assert cache.usage().in_use == 3


def test_full_pages_of_forks_are_never_copied():
    cache = make_cache(6)
    parent = prefill(cache, ABC[:8], commit=False)
    child = cache.fork(parent)
    with NoOperators() as mode:
        cache.extend_all([(parent, 1), (child, 1)])
    assert mode.ran == []
    assert parent.pages[:2] == child.pages[:2]
    assert parent.pages[2] != child.pages[2]


@pytest.mark.parametrize("length", [0, 3, 4, 5, 8, 10])
def test_forks_of_a_part(length):
    cache = make_cache(9)
    parent = prefill(cache, ABC[:10])
    child = cache.fork(parent, length)
    assert child.length == length
    assert child.pages == parent.pages[: -(-length // 4)]
    other = [*ABC[:length], 7, 7, 7]
    grow(cache, child, other)
    check(cache, {parent: ABC[:10], child: other})
    grow(cache, parent, ABC)
    check(cache, {parent: ABC, child: other})
    cache.free(parent)
    check(cache, {child: other})


def test_forks_in_one_batch_take_what_they_need_and_no_more():
    """Of four that hold the last page three get copies, so three pages are enough."""
    cache = make_cache(4)
    parent = prefill(cache, ABC[:3], commit=False)
    forks = [parent, *(cache.fork(parent) for _ in range(3))]
    slots = cache.extend_all([(one, 1) for one in forks])
    assert len(set(slots)) == 4
    assert free_and_evictable(cache) == (0, 0)
    contents = {one: [*ABC[:3], token] for token, one in enumerate(forks)}
    cases.write(cache, slots, [cases.fingerprints(ids)[3] for ids in contents.values()])
    check(cache, contents)

    cache.reset()
    parent = prefill(cache, ABC[:3], commit=False)
    forks = [cache.fork(parent) for _ in range(4)]  # and the parent, which does not write
    with pytest.raises(OutOfPages, match="needed 4, free 3, evictable 0, total 4;"):
        cache.extend_all([(one, 1) for one in forks])
    assert [one.pages for one in forks] == [parent.pages] * 4


# Prefixes


@pytest.mark.parametrize(
    ("committed", "prompt", "shared"),
    [
        (ABC, ABC, 8),  # not the last page: a token is left to compute
        (ABC, [*ABC, 1], 12),
        (ABC, ABC[:9], 8),
        (ABC, ABC[:8], 4),
        (ABC, ABC[:5], 4),
        (ABC, ABC[:4], 0),
        (ABC, [], 0),
        (ABC, [*ABC[:4], 1, *ABC[5:]], 4),
        (ABC, [1, *ABC[1:]], 0),
        (ABC, ABC[4:], 0),  # the same blocks, behind others
        (ABC[:11], [*ABC, 1], 8),  # the third page is not full
        ([7] * 12, [7] * 12, 8),  # the same block, at three places
        ([-1, 2**62, 0, 5], [-1, 2**62, 0, 5, 5], 4),
        ([-1, 2**62, 0, 5], [-1, 2**62 + 1, 0, 5, 5], 0),
    ],
)
def test_the_longest_known_prefix_is_shared(committed, prompt, shared):
    cache = make_cache(8)
    first = prefill(cache, committed)
    second = cache.allocate(prompt)
    assert second.length == shared
    assert second.pages == first.pages[: shared // 4]
    usage = cache.usage()
    assert usage.prefix_hits == shared
    assert usage.prefix_lookups == len(committed) + len(prompt)
    grow(cache, second, prompt)
    check(cache, {first: committed, second: prompt})


def test_prompts_are_anything_that_has_whole_numbers():
    cache = make_cache(8)
    prefill(cache, ABC)
    for prompt in (tuple(ABC), range(100, 112), torch.tensor(ABC)):
        assert cache.allocate(prompt).length == 8
    text = b"ABCDEFGHI"
    prefill(cache, text)
    assert cache.allocate(list(text)).length == 8


def test_nothing_is_known_before_it_is_committed():
    cache = make_cache(8)
    first = prefill(cache, ABC, commit=False)
    assert cache.allocate(ABC).length == 0
    cache.commit(first, ABC[:7])
    assert cache.allocate(ABC).length == 4
    cache.commit(first, ABC)
    assert cache.allocate([*ABC, 1]).length == 12


def test_known_pages_outlive_their_sequences():
    cache = make_cache(4)
    one = prefill(cache, ABC[:10])
    cache.free(one)
    assert free_and_evictable(cache) == (2, 2)
    again = cache.allocate(ABC[:10])
    assert again.length == 8
    assert free_and_evictable(cache) == (2, 0)
    check(cache, {again: ABC[:8]})


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_discarded_pages_are_zero_and_unknown(layout, dtype):
    """And so is what follows them in the tree; pages that another sequence holds are kept."""
    cache = make_cache(8, dtype=dtype, kv_layout=layout)
    for part in (cache._keys, cache._values):
        part.copy_(torch.full(part.shape, torch.nan))
    beginning = cache.allocate(ABC[:4])
    cache.extend(beginning, 4)
    cache.commit(beginning, ABC[:4])
    follower = cache.allocate([*ABC, 1])
    cache.extend(follower, 9)
    cache.commit(follower, ABC)
    bad = cache.allocate([*ABC[:8], 5, 5])
    assert bad.length == 8
    cache.extend(bad, 2)
    pages = list(follower.pages)
    own = bad.pages[2]
    cache.free(follower)
    assert free_and_evictable(cache) == (4, 1)
    cache.discard(bad)
    assert free_and_evictable(cache) == (7, 0)
    assert cache.allocate([*ABC, 1]).length == 4  # of the page that `beginning` holds
    zeroed = {*pages[1:3], own}
    for layer in range(cache.layers):
        for part in (cache.key_cache(layer), cache.value_cache(layer)):
            for page in range(8):
                is_zero = not part[page].float().nan_to_num(1.0).any()
                assert is_zero == (page in zeroed)


def test_two_that_computed_the_same_keep_one_page():
    cache = make_cache(8)
    first = prefill(cache, ABC[:10], commit=False)
    second = prefill(cache, ABC[:10], commit=False)
    assert cache.commit(first, ABC[:10]) == 0
    assert cache.commit(second, ABC[:10]) == 2
    assert second.pages[:2] == first.pages[:2]
    assert second.pages[2] != first.pages[2]
    assert free_and_evictable(cache) == (4, 0)
    assert cache.commit(second, ABC[:10]) == 0
    check(cache, {first: ABC[:10], second: ABC[:10]})
    cache.free(first)
    check(cache, {second: ABC[:10]})


def test_a_page_that_a_fork_holds_is_not_exchanged():
    cache = make_cache(12)
    first, second = (prefill(cache, ABC, commit=False) for _ in range(2))
    fork = cache.fork(second, 5)
    cache.commit(first, ABC)
    before = second.pages
    assert cache.commit(second, ABC) == 0
    assert second.pages == before
    check(cache, {first: ABC, second: ABC, fork: ABC[:5]})
    cache.free(fork)
    assert cache.commit(second, ABC) == 3
    assert second.pages == first.pages
    check(cache, {first: ABC, second: ABC})


def test_other_tokens_than_a_fork_committed_are_refused():
    cache = make_cache(4)
    first = prefill(cache, ABC[:8], commit=False)
    second = cache.fork(first)
    cache.commit(first, ABC[:8])
    with pytest.raises(ValueError, match="not those that were committed of page 0"):
        cache.commit(second, [1, *ABC[1:8]])
    assert cache.commit(second, ABC[:8]) == 0
    check(cache, {first: ABC[:8], second: ABC[:8]})


def test_without_sharing_nothing_is_kept():
    cache = make_cache(4, prefix_sharing=False)
    one = prefill(cache, ABC[:8])
    assert cache.allocate(ABC).length == 0
    cache.free(one)
    assert free_and_evictable(cache) == (4, 0)
    assert cache.usage().prefix_lookups == 0


def test_a_known_page_is_copied_before_it_is_written_to():
    cache = make_cache(6)
    one = prefill(cache, ABC[:8])
    before = one.pages
    cache.truncate(one, 6)
    other = [*ABC[:6], 7, 7, 7]
    grow(cache, one, other)
    assert one.pages[1] != before[1]
    check(cache, {one: other})
    again = cache.allocate([*ABC[:8], 1])
    assert again.pages == before
    check(cache, {one: other, again: ABC[:8]})


def test_a_known_page_is_written_to_where_there_is_none_for_a_copy():
    """A sequence can always be extended within the pages that it holds alone."""
    cache = make_cache(3)
    one = prefill(cache, ABC)
    before = one.pages
    cache.truncate(one, 6)  # the third page can be evicted, and is taken for the second's copy
    other = [*ABC[:6], 7]
    grow(cache, one, other)
    check(cache, {one: other})
    assert one.pages == (before[0], before[2])
    assert free_and_evictable(cache) == (0, 1)

    cache.reset()
    one, rest = prefill(cache, ABC[:8]), prefill(cache, [1])
    cache.truncate(one, 6)
    before = one.pages
    grow(cache, one, other)
    assert one.pages == before
    check(cache, {one: other, rest: [1]})
    assert cache.allocate(ABC).length == 4  # the second page is known no more


def test_one_page_to_spare_is_enough_for_the_copies_of_a_batch():
    cache = make_cache(5)
    contents = {prefill(cache, ids): [*ids[:6], 7] for ids in (ABC[:8], [1] * 8)}
    for one in contents:
        cache.truncate(one, 6)
    slots = cache.extend_all([(one, 1) for one in contents])
    assert slots == [4 * 4 + 2, 1 * 4 + 2]  # the second one's copy is where the first was read
    cases.write(cache, slots, [cases.fingerprints(ids)[-1] for ids in contents.values()])
    check(cache, contents)
    assert known(cache, ABC[:8], [1] * 8) == [4, 8]


def test_what_follows_an_overwritten_page_is_evicted_first():
    """The page of one sequence is overwritten while another takes what followed it."""
    cache = make_cache(4)
    one, two = prefill(cache, ABC), prefill(cache, [1, 2, 3, 4])
    cache.truncate(one, 6)
    contents = {one: [*ABC[:6], 7], two: [1, 2, 3, 4, 5]}
    slots = cache.extend_all([(one, 1), (two, 1)])
    states = [cases.fingerprints(tokens)[-1] for tokens in contents.values()]
    cases.write(cache, slots, states)
    check(cache, contents)
    assert free_and_evictable(cache) == (0, 0)
    assert cache.allocate(ABC).length == 4


# Eviction


def known(cache: PagedKVCache, *prompts: list[int]) -> list[int]:
    """How many tokens of each are found; leaves the order of eviction as it is."""
    found = []
    order = list(cache._pool.evictable)
    for prompt in prompts:
        sequence = cache.allocate([*prompt, 0])
        found.append(sequence.length)
        cache.free(sequence)
    for page in order:
        cache._pool.evictable.move_to_end(page)
    return found


def test_the_least_recently_used_goes_first_and_leaves_before_what_they_follow():
    cache = make_cache(6)
    old, new = [1] * 12, [2] * 8
    for prompt in (old, new):
        cache.free(prefill(cache, prompt))
    assert free_and_evictable(cache) == (1, 5)
    taker = cache.allocate()
    found = []
    for _ in range(6):
        cache.extend(taker, 4)
        found.append(known(cache, old, new))
    assert found == [[12, 8], [8, 8], [4, 8], [0, 8], [0, 4], [0, 0]]
    with pytest.raises(OutOfPages):
        cache.extend(taker, 1)


def test_use_makes_recent():
    cache = make_cache(4)
    old, new = [1] * 8, [2] * 8
    for prompt in (old, new, old):
        sequence = cache.allocate([*prompt, 0])
        if not sequence.length:
            grow(cache, sequence, prompt)
            cache.commit(sequence, prompt)
        cache.free(sequence)
    taker = cache.allocate()
    cache.extend(taker, 8)
    assert known(cache, old, new) == [8, 0]


def test_what_is_in_use_is_not_evicted():
    cache = make_cache(4)
    prompt = [1] * 12
    cache.free(prefill(cache, prompt))
    held = cache.allocate(prompt[:9])
    assert held.length == 8
    taker = cache.allocate()
    cache.extend(taker, 8)
    assert known(cache, prompt) == [8]
    with pytest.raises(OutOfPages):
        cache.extend(taker, 1)
    check(cache, {held: prompt[:8]} | {taker: taker_content(cache, taker)})


def taker_content(cache: PagedKVCache, taker: KVSequence) -> list[int]:
    tokens = [9] * taker.length
    cases.write(cache, cache.slots(taker, 0, taker.length), cases.fingerprints(tokens))
    return tokens


# Errors


def test_out_of_pages_says_the_numbers_and_changes_nothing():
    cache = make_cache(6)
    a, b = prefill(cache, ABC[:7]), prefill(cache, [1, 2, 3])
    cache.free(prefill(cache, [5] * 8))
    before = (a.length, a.pages, b.length, b.pages, cache.usage(), list(cache._pool.evictable))
    with pytest.raises(OutOfPages) as caught:
        cache.extend_all([(b, 1), (a, 14)])
    error = pickle.loads(pickle.dumps(caught.value))
    for one in (caught.value, error):
        assert isinstance(one, RuntimeError)
        assert (one.needed, one.free, one.evictable, one.total) == (4, 1, 2, 6)
        assert str(one) == (
            "out of pages: needed 4, free 1, evictable 2, total 6; free or truncate sequences, or "
            "create a cache with more pages"
        )
    assert before == (
        a.length,
        a.pages,
        b.length,
        b.pages,
        cache.usage(),
        list(cache._pool.evictable),
    )
    check(cache, {a: ABC[:7], b: [1, 2, 3]})
    cache.extend_all([(b, 1), (a, 13)])


NUMBERS = ["layers", "pages", "page_size", "heads_kv", "head_size", "value_size"]


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("number", [0, -3, 1.5, "4"])
def test_sizes_that_are_no_sizes(name, number):
    sizes = dict.fromkeys(NUMBERS, 2) | {name: number}
    with pytest.raises(
        ValueError, match=f"{name} must be a whole number, at least 1, got {number!r}"
    ):
        PagedKVCache(**sizes, dtype=torch.float32, device="cpu")


@pytest.mark.parametrize("size", [3, 12, 48])
def test_page_sizes_that_attention_does_not_take(size):
    with pytest.raises(ValueError, match=f"page_size must be a power of 2, got {size}"):
        make_cache(2, size)


def test_unknown_layouts():
    with pytest.raises(ValueError, match='kv_layout must be "NHD" or "HND", got \'BSHD\''):
        make_cache(2, kv_layout="BSHD")


MISTAKES = {
    "negative count": (lambda c, s: c.extend(s, -1), "count .* at least 0, got -1"),
    "broken count": (lambda c, s: c.extend(s, 1.0), "count .* at least 0, got 1.0"),
    "negative count in a batch": (lambda c, s: c.extend_all([(s, -1)]), "count .* got -1"),
    "twice in a batch": (lambda c, s: c.extend_all([(s, 1), (s, 1)]), "name a sequence twice"),
    "truncate beyond": (lambda c, s: c.truncate(s, 8), "length must be at most .* 7, got 8"),
    "truncate below": (lambda c, s: c.truncate(s, -1), "length .* at least 0, got -1"),
    "fork beyond": (lambda c, s: c.fork(s, 8), "length must be at most .* 7, got 8"),
    "fork below": (lambda c, s: c.fork(s, -1), "length .* at least 0, got -1"),
    "commit beyond": (lambda c, s: c.commit(s, ABC[:8]), "token_ids must be at most .* 7, got 8"),
    "commit words": (lambda c, s: c.commit(s, ["a"] * 7), "token_ids must be 64-bit integers"),
    "commit fractions": (lambda c, s: c.commit(s, [0.5] * 7), "token_ids must be 64-bit integers"),
    "allocate words": (
        lambda c, s: c.allocate(list("abcdef")),
        "token_ids must be 64-bit integers",
    ),
    "allocate huge": (lambda c, s: c.allocate([2**63] * 6), "token_ids must be 64-bit integers"),
    "slots beyond": (lambda c, s: c.slots(s, 0, 8), "start and stop must be 0 to .* 7, .* 0 and 8"),
    "slots backwards": (lambda c, s: c.slots(s, 3, 2), "in this order, got 3 and 2"),
    "slots below": (lambda c, s: c.slots(s, -1, 2), "start .* at least 0, got -1"),
    "narrow table": (lambda c, s: c.page_table([s], 1), "width must be at least 2, .* got 1"),
    "negative width": (lambda c, s: c.page_table([], -1), "width .* at least 0, got -1"),
    "no such layer": (lambda c, s: c.key_cache(2), "layer must be 0 to 1, got 2"),
    "layer from the end": (lambda c, s: c.value_cache(-1), "layer must be 0 to 1, got -1"),
    "append to no layer": (lambda c, s: c.append(2, *[torch.ones(0)] * 3), "layer .* got 2"),
}


@pytest.mark.parametrize(("call", "sentence"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes(call, sentence):
    cache = make_cache(8)
    sequence = prefill(cache, ABC[:7], commit=False)
    with pytest.raises(ValueError, match=sentence):
        call(cache, sequence)
    check(cache, {sequence: ABC[:7]})


USES = {
    "fork": lambda c, s: c.fork(s),
    "extend": lambda c, s: c.extend(s, 1),
    "extend_all": lambda c, s: c.extend_all([(c.allocate(), 1), (s, 0)]),
    "truncate": lambda c, s: c.truncate(s, 0),
    "free": lambda c, s: c.free(s),
    "discard": lambda c, s: c.discard(s),
    "commit": lambda c, s: c.commit(s, []),
    "slots": lambda c, s: c.slots(s, 0, 0),
    "page_table": lambda c, s: c.page_table([c.allocate(), s]),
    "seq_lens": lambda c, s: c.seq_lens([c.allocate(), s]),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_sequences_that_are_not_there(use):
    cache, other = make_cache(4), make_cache(4)
    freed, reset = cache.allocate(), cache.allocate()
    cache.free(freed)
    with pytest.raises(ValueError, match="sequence has been freed"):
        use(cache, freed)
    with pytest.raises(ValueError, match=r"sequence belongs to another cache: KVSequence\("):
        use(cache, other.allocate())
    with pytest.raises(ValueError, match="sequence must be one that this cache allocated, got 3"):
        use(cache, 3)
    assert free_and_evictable(cache) == (4, 0)
    cache.reset()
    with pytest.raises(ValueError, match="sequence has been freed"):
        use(cache, reset)


# For the kernels


def test_page_tables():
    cache = make_cache(8)
    a, b, c = (cache.allocate() for _ in range(3))
    cache.extend_all([(a, 9), (b, 4)])
    table = cache.page_table([b, a, c, b])
    assert table.dtype == torch.int32
    assert table.device.type == "cpu"
    assert table.is_contiguous()
    assert table.tolist() == [[3, 0, 0], [0, 1, 2], [0, 0, 0], [3, 0, 0]]
    assert cache.page_table([b], 2).tolist() == [[3, 0]]
    assert cache.page_table([c]).tolist() == [[0]]
    assert cache.page_table([c], 0).shape == (1, 0)
    assert cache.page_table([], 3).shape == (0, 3)
    assert cache.page_table([]).shape == (0, 1)
    cache.extend(b, 1)
    assert table[0].tolist() == [3, 0, 0]  # what was given is not changed
    assert cache.page_table([b]).tolist() == [[3, 4]]


def test_seq_lens():
    cache = make_cache(8)
    a, b = (cache.allocate() for _ in range(2))
    cache.extend(a, 9)
    lengths = cache.seq_lens([a, b, a])
    assert lengths.dtype == torch.int32
    assert lengths.tolist() == [9, 0, 9]
    assert cache.seq_lens([]).shape == (0,)
    assert cache.seq_lens([]).dtype == torch.int32


def test_append_hands_over_the_layer_and_the_layout(monkeypatch):
    calls = []
    monkeypatch.setattr(memory, "_append", lambda *args: calls.append(args))
    key, value, slots = torch.ones(3, 1, 8), torch.ones(3, 1, 4), torch.tensor([0, -1, 5])
    for layout in LAYOUTS:
        cache = make_cache(4, kv_layout=layout)
        cache.append(1, key, value, slots)
        *tensors, head_major = calls.pop()
        expected = [cache.key_cache(1), cache.value_cache(1), key, value, slots]
        assert all(a is b for a, b in zip(tensors, expected, strict=True))
        assert head_major == (layout == "HND")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_append_with_the_operator(device, layout, monkeypatch):
    monkeypatch.setattr(memory, "_append", OPERATOR)
    cache = make_cache(4, kv_layout=layout, device=device)
    plain = make_cache(4, kv_layout=layout, device=device)
    key, value = torch.randn(5, 1, 8, device=device), torch.randn(5, 1, 4, device=device)
    slots = torch.tensor([0, 13, -1, 6, 15], device=device)
    cache.append(1, key, value, slots)
    cases.append(plain.key_cache(1), plain.value_cache(1), key, value, slots, layout == "HND")
    for layer in range(2):
        assert torch.equal(cache.key_cache(layer), plain.key_cache(layer))
        assert torch.equal(cache.value_cache(layer), plain.value_cache(layer))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_random_steps_with_the_operator(device, layout, monkeypatch):
    monkeypatch.setattr(memory, "_append", OPERATOR)
    walk = cases.Walk(make_cache(24, kv_layout=layout, device=device), 5)
    for _ in range(300):
        walk.step()


@pytest.mark.gpu
def test_copies_do_not_wait_for_the_gpu():
    cache = make_cache(8, device="cuda")
    parent = prefill(cache, ABC[:6], commit=False)
    child = cache.fork(parent)
    torch.cuda.set_sync_debug_mode("error")
    try:
        cache.extend(child, 1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert child.pages[1] != parent.pages[1]
    cache.truncate(child, 6)
    check(cache, {parent: ABC[:6], child: ABC[:6]})


# The whole


def test_usage():
    cache = make_cache(10)
    empty = CacheUsage(10, 10, 0, 0, 0, 0, 0, 0.0, 0, 0)
    assert cache.usage() == empty
    a = prefill(cache, ABC[:10])
    cache.free(prefill(cache, [1] * 5))
    b = cache.fork(a, 9)
    c = cache.allocate(ABC[:9])
    assert cache.usage() == CacheUsage(
        pages=10,
        free=6,
        evictable=1,
        in_use=3,
        shared=3,
        sequences=3,
        tokens=10,
        fill=10 / 12,
        prefix_hits=8,
        prefix_lookups=10 + 5 + 9,
    )
    cache.free(a)
    assert cache.usage().tokens == 9  # b has one token of the third page
    cache.truncate(b, 7)
    assert cache.usage().tokens == 8  # c has all of the second
    cache.free(c)
    assert cache.usage().tokens == 7
    cache.reset()
    assert cache.usage() == empty


def test_reset_forgets_everything():
    cache = make_cache(4)
    prefill(cache, ABC)
    cache.reset()
    assert cache.allocate(ABC).length == 0
    assert cache.usage().free == 4
    one = prefill(cache, ABC)
    assert one.pages == (0, 1, 2)


@pytest.mark.parametrize(
    ("steps", "seed", "pages", "options"),
    [
        (10_000, 0, 24, {}),
        (2_000, 1, 24, {"kv_layout": "HND"}),
        (2_000, 2, 24, {"prefix_sharing": False}),
        (2_000, 3, 12, {}),
        (2_000, 4, 40, {"page_size": 1}),
    ],
)
def test_random_steps_against_plain_lists(steps, seed, pages, options):
    walk = cases.Walk(make_cache(pages, **options), seed)
    for _ in range(steps):
        walk.step()
    # Everything happened; what is rare, in the long walk.
    expected = ["allocate", "fork", "extend", "truncate", "commit", "free", "out of pages"]
    if walk.cache.prefix_sharing:
        expected += ["shared", "not shared", "evicted"]
    assert all(walk.did[what] >= 20 for what in expected), walk.did
    if steps == 10_000:
        assert all(walk.did[what] for what in ("exchanged", "in the way", "overwritten")), walk.did


def test_names():
    assert {"CacheUsage", "KVSequence", "OutOfPages", "PagedKVCache"} <= set(cudnn_ops.__all__)
