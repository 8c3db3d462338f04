"""Prefix tree over full pages: which pages already hold the keys of a token sequence. Host side.

A page is immutable once all its positions are computed from accepted tokens, so requests share it
without a copy. A node is one page; the path to it spells every token before it, so equal paths
mean equal contents. Latent and index key of a position live under the same page number: a hit has
both or is none.

The MTP layer's row at position p also depends on token p + 1. Pages that carry it are therefore
keyed by one token more than they hold, and kept apart (`kind`) from pages computed without it.

A node is in one of two tiers: its page is on the device, or, once evicted from there, in a slot of
the host tier, if there is one. Nodes on the device are the upper part of the tree: every path runs
through device nodes, then through host nodes. Nodes in use are an upper part as well, because a
request uses whole paths, so whatever lies below an idle node is idle.

The tree knows page and slot numbers only. Who holds references to pages, and when the tree has to
give some back, is the scheduler's business; the host tier moves the contents.
"""

import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol


class HostTier(Protocol):
    """Room for `capacity` pages outside the device, numbered by slots.

    kind: does the page carry the MTP layer. Contents must have been copied, as far as later use
    of page and slot can tell, when a call returns.
    """

    @property
    def capacity(self) -> int: ...

    def save(self, page: int, slot: int, kind: bool) -> None: ...

    def load(self, slot: int, page: int, kind: bool) -> None: ...


class Node:
    """One shared page, on the device (`page`) or on the host (`slot`). Compared by identity."""

    __slots__ = (
        "children",
        "depth",
        "device_children",
        "key",
        "kind",
        "last_used",
        "page",
        "parent",
        "slot",
        "users",
    )

    def __init__(self, parent: "Node | None", key: tuple[int, ...], kind: bool) -> None:
        self.parent = parent
        self.depth: int = 0 if parent is None else parent.depth + 1  # pages up to this one
        self.key = key
        self.kind = kind
        self.page: int | None = None
        self.slot: int | None = None
        self.children: dict[tuple[int, ...], Node] = {}
        self.device_children = 0
        self.users = 0
        self.last_used = 0  # of a leaf; what is above it was used no earlier, and goes after it


class _EvictionQueue:
    """Nodes that may be evicted from a tier, least recently used first.

    What happens to a node after it was queued is found out when its turn comes, so that using it
    costs nothing here.
    """

    def __init__(self, evictable: Callable[[Node], bool]) -> None:
        self._evictable = evictable
        self._heap: list[tuple[int, int, Node]] = []
        self._queued: set[Node] = set()
        self._ties = itertools.count()

    def offer(self, node: Node) -> None:
        if node not in self._queued and self._evictable(node):
            self._queued.add(node)
            heapq.heappush(self._heap, (node.last_used, next(self._ties), node))

    def pop(self) -> Node | None:
        while self._heap:
            queued_at, _, node = heapq.heappop(self._heap)
            self._queued.remove(node)
            if node.last_used == queued_at and self._evictable(node):
                return node
            self.offer(node)
        return None


def _evictable_from_device(node: Node) -> bool:
    return node.page is not None and not node.device_children and not node.users


def _evictable_from_host(node: Node) -> bool:
    return node.slot is not None and not node.children and not node.users


class PrefixTree:
    """Pages by the tokens that lead to them, least recently used first to go."""

    def __init__(self, page_size: int, host: HostTier | None = None) -> None:
        self.page_size = page_size
        self._host = host
        self._clock = itertools.count(1)
        self.num_to_host = self.num_from_host = self.num_host_evictions = 0
        self._reset()

    def _reset(self) -> None:
        self._roots = {kind: Node(None, (), kind) for kind in (False, True)}
        self._num_pages = self._num_idle = 0
        capacity = 0 if self._host is None else self._host.capacity
        self._free_slots = list(range(capacity - 1, -1, -1))
        self._device_queue = _EvictionQueue(_evictable_from_device)
        self._host_queue = _EvictionQueue(_evictable_from_host)

    def __len__(self) -> int:
        """Pages held on the device."""
        return self._num_pages

    @property
    def num_idle(self) -> int:
        """Pages on the device that no request uses: so many can be evicted."""
        return self._num_idle

    def nodes(self) -> Iterator[Node]:
        """Every node, of both tiers and kinds."""
        pending = list(self._roots.values())
        while pending:
            children = pending.pop().children.values()
            pending += children
            yield from children

    def pages(self) -> Iterator[int]:
        """Every page that the tree holds on the device."""
        return (node.page for node in self.nodes() if node.page is not None)

    def root(self, kind: bool) -> Node:
        """Where paths of a kind begin. kind: do the pages carry the MTP layer."""
        return self._roots[kind]

    def match(self, tokens: Sequence[int], kind: bool, num_pages: int) -> list[Node]:
        """The longest path of at most `num_pages` pages, which `tokens` must spell in full."""
        path: list[Node] = []
        node = self._roots[kind]
        for _ in range(num_pages):
            child = node.children.get(self._key(node, tokens))
            if child is None:
                break
            path.append(child)
            node = child
        return path

    def acquire(self, nodes: Sequence[Node]) -> None:
        """Use nodes that follow each other, below others in use: none of them is evicted now."""
        for node in nodes:
            assert node.parent is not None and (node.parent.users or node.parent.parent is None)
            self._num_idle -= node.page is not None and not node.users
            node.users += 1

    def release(self, path: Sequence[Node]) -> None:
        """Stop using a path, from its first node on."""
        if path:
            # What is above it is evicted later, and then next, however old its own time is.
            path[-1].last_used = next(self._clock)
        for node in path:
            assert node.users > 0
            node.users -= 1
            self._num_idle += node.page is not None and not node.users
            self._offer(node)

    def extend(self, node: Node, tokens: Sequence[int], page: int) -> tuple[Node, bool]:
        """The node of the page after `node`'s, and whether it holds `page` from now on.

        node: the root, or on the device. tokens: of the request, up to the page's last position at
        least (with the MTP layer: one more).
        """
        assert node.page is not None or node.parent is None
        key = self._key(node, tokens)
        child = node.children.get(key)
        if child is None:
            child = node.children[key] = Node(node, key, node.kind)
        elif child.page is not None:
            return child, False
        self._enter_device(child, page)
        child.last_used = next(self._clock)
        self._offer(child)
        return child, True

    def restore(self, node: Node, page: int) -> None:
        """Bring a node in use, whose parent is on the device, back from the host into `page`."""
        assert self._host is not None and node.slot is not None and node.users
        self._host.load(node.slot, page, node.kind)
        self.num_from_host += 1
        self._enter_device(node, page)

    def evict(self) -> int:
        """Move the least recently used idle page to the host tier, or forget it; its number.

        There must be one, see `num_idle`.
        """
        node = self._device_queue.pop()
        assert node is not None and node.page is not None and node.parent is not None
        page, slot = node.page, self._take_slot()
        if slot is not None:
            assert self._host is not None
            try:
                self._host.save(page, slot, node.kind)
            except BaseException:
                self._free_slots.append(slot)
                self._offer(node)
                raise
            self.num_to_host += 1
        node.page, node.slot = None, slot
        self._num_pages -= 1
        self._num_idle -= 1
        node.parent.device_children -= 1
        self._offer(node.parent)
        if slot is None:
            self._forget(node)
        self._offer(node)
        return page

    def clear(self) -> list[int]:
        """Forget everything, in both tiers; the pages that were held."""
        pages = list(self.pages())
        self._reset()
        return pages

    def _key(self, node: Node, tokens: Sequence[int]) -> tuple[int, ...]:
        start = node.depth * self.page_size
        key = tuple(tokens[start : start + self.page_size + node.kind])
        assert len(key) == self.page_size + node.kind
        return key

    def _enter_device(self, node: Node, page: int) -> None:
        assert node.parent is not None and node.page is None
        if node.slot is not None:
            self._free_slots.append(node.slot)
        node.page, node.slot = page, None
        node.parent.device_children += 1
        self._num_pages += 1
        self._num_idle += not node.users

    def _take_slot(self) -> int | None:
        """A free slot, if need be that of the least recently used leaf."""
        if not self._free_slots:
            leaf = self._host_queue.pop()
            if leaf is None:
                return None
            assert leaf.slot is not None
            self._free_slots.append(leaf.slot)
            leaf.slot = None
            self._forget(leaf)
            self.num_host_evictions += 1
        return self._free_slots.pop()

    def _forget(self, node: Node) -> None:
        assert node.parent is not None and not node.children
        del node.parent.children[node.key]
        self._offer(node.parent)

    def _offer(self, node: Node) -> None:
        self._device_queue.offer(node)
        self._host_queue.offer(node)
