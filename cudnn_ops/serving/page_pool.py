"""Ownership of a cache's pages, and prefix caching: a radix tree of pages by their content.

Pages are numbers here; :mod:`cudnn_ops.serving.kv_cache` has the memory and the sequences.
Invariants:

- A page is free, or held by sequences, or held by none but in the tree: then it is *evictable*.
- All holders of a page hold the same page before it; for a page in the tree, its parent's page. So
  a page loses its last holder before its ancestors do, and evicting pages in the order in which
  they lost their last holder evicts leaves first, without a search.
- A page that is in the tree, or that has several holders, is not written to.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, MutableSequence, Sequence


class OutOfPages(RuntimeError):
    """Too few pages are available for a request; nothing has been changed.

    Attributes:
        needed: requested pages.
        free: empty pages.
        evictable: pages that no sequence holds, kept for prefix caching.
        total: pages of the cache.
    """

    def __init__(self, needed: int, free: int, evictable: int, total: int) -> None:
        super().__init__(needed, free, evictable, total)
        self.needed, self.free, self.evictable, self.total = needed, free, evictable, total

    def __str__(self) -> str:
        return (
            f"out of pages: needed {self.needed}, free {self.free}, evictable {self.evictable}, "
            f"total {self.total}; free or truncate sequences, or create a cache with more pages"
        )


def token_blocks(token_ids: Sequence[int], page_size: int, start: int, stop: int) -> list[bytes]:
    """The tokens of pages ``start`` to ``stop - 1``, as keys of the tree.

    Raises:
        ValueError: not 64-bit integers.
    """
    tokens = list(token_ids[start * page_size : stop * page_size])
    try:
        words = array("q", tokens).tobytes()
    except (TypeError, OverflowError) as error:
        raise ValueError(f"token_ids must be 64-bit integers: {error}") from None
    size = 8 * page_size
    return [words[i : i + size] for i in range(0, len(words), size)]


class Node:
    """A full page in the tree: its tokens follow those of its ancestors."""

    __slots__ = ("block", "children", "page", "parent")

    def __init__(self, parent: Node | None, block: bytes, page: int) -> None:
        """Keyed by the tokens themselves, not by a hash: there are no false matches."""
        self.parent = parent
        self.block = block
        self.page = page
        self.children: dict[bytes, Node] = {}


class PagePool:
    """Pages 0 to ``total - 1``, all of them free."""

    def __init__(self, total: int) -> None:
        """The lists are public for loops over a batch, where a call per page is too slow."""
        self.total = total
        self.free = list(range(total - 1, -1, -1))  # taken from the end
        self.evictable: OrderedDict[int, None] = OrderedDict()  # by when they lost their holder
        self.holders = [0] * total
        self.nodes: list[Node | None] = [None] * total
        self.shared = 0
        self._root = Node(None, b"", -1)

    @property
    def available(self) -> int:
        """Pages that :meth:`take` can give."""
        return len(self.free) + len(self.evictable)

    def take(self) -> int:
        """A free page, or else the least recently used evictable one; it is held from now on.

        The caller must have made sure that ``available`` is at least 1.
        """
        if self.free:
            page = self.free.pop()
        else:
            page, _ = self.evictable.popitem(last=False)
            self.forget(page)
        self.holders[page] = 1
        return page

    def hold(self, pages: Iterable[int]) -> None:
        """Adds a holder to each page."""
        holders = self.holders
        for page in pages:
            holders[page] += 1
            if holders[page] == 1:
                del self.evictable[page]
            elif holders[page] == 2:
                self.shared += 1

    def let_go(self, pages: Sequence[int]) -> None:
        """Removes a holder from each of a sequence's pages, the last page first."""
        holders = self.holders
        for page in reversed(pages):
            holders[page] -= 1
            if holders[page] == 1:
                self.shared -= 1
            elif not holders[page]:
                if self.nodes[page] is None:
                    self.free.append(page)
                else:
                    self.evictable[page] = None

    def drop(self, pages: Iterable[int]) -> list[int]:
        """Frees those of a sequence's pages that nobody holds, and what follows them in the tree.

        Returns:
            The pages, all of which are free now.
        """
        dropped: list[int] = []
        for page in pages:
            node = self.nodes[page]
            if self.holders[page]:
                continue
            if node is None:
                dropped.append(page)
                continue
            # What follows a page that nobody holds is held by nobody either.
            family = [node]
            for each in family:
                family.extend(each.children.values())
            for each in reversed(family):  # leaves first
                self.forget(each.page)
                del self.evictable[each.page]
                self.free.append(each.page)
                dropped.append(each.page)
        return dropped

    def forget(self, page: int) -> None:
        """Removes a leaf from the tree."""
        node = self.nodes[page]
        assert node is not None
        assert node.parent is not None
        assert not node.children
        del node.parent.children[node.block]
        self.nodes[page] = None

    def find(self, blocks: Iterable[bytes]) -> array[int]:
        """The pages of the longest known prefix of ``blocks``; they are held from now on."""
        pages, node = array("i"), self._root
        for block in blocks:
            child = node.children.get(block)
            if child is None:
                break
            pages.append(child.page)
            node = child
        self.hold(pages)
        return pages

    def enter(
        self, pages: MutableSequence[int], done: int, blocks: Iterable[bytes]
    ) -> tuple[int, int]:
        """Enters the full pages of one sequence into the tree.

        A page whose content is there already is exchanged for the one that is there. One that a
        fork holds too cannot be: the fork would keep the old page, and then hold pages of the tree
        without their ancestors. There it ends.

        Args:
            pages: all that the sequence holds; exchanged in place.
            done: how many of the first are in the tree, and are a path in it.
            blocks: what is in those that follow.

        Returns:
            How many are in the tree now, and how many were exchanged.

        Raises:
            ValueError: a page is in the tree with other content.
        """
        exchanged = 0
        node = (self.nodes[pages[done - 1]] if done else None) or self._root
        for block in blocks:
            page = pages[done]
            own, child = self.nodes[page], node.children.get(block)
            if own is not None and own is not child:
                raise ValueError(f"token_ids are not those that were committed of page {page}")
            if child is None:
                child = self.nodes[page] = node.children[block] = Node(node, block, page)
            elif own is None:
                if self.holders[page] > 1:
                    break
                self.hold((child.page,))
                self.let_go((page,))
                pages[done] = child.page
                exchanged += 1
            node = child
            done += 1
        return done, exchanged
