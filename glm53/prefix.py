"""Prefix tree over full pages: which pages already hold the keys of a token sequence. Host side.

A page is immutable once all its positions are computed from accepted tokens, so requests share it
without a copy. A node is one page; the path to it spells every token before it, so equal paths
mean equal contents. Latent and index key of a position live under the same page number: a hit has
both or is none.

The MTP layer's row at position p also depends on token p + 1. Pages that carry it are therefore
keyed by one token more than they hold, and kept apart (`kind`) from pages computed without it.

The tree knows page numbers only. Who holds references to pages, and when the tree has to give some
back, is the scheduler's business.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence


class Node:
    """One shared page. Compared by identity."""

    __slots__ = ("children", "depth", "key", "page", "parent")

    def __init__(self, parent: "Node | None", key: tuple[int, ...], page: int) -> None:
        self.parent = parent
        self.depth: int = 0 if parent is None else parent.depth + 1  # pages up to this one
        self.key = key
        self.page = page
        self.children: dict[tuple[int, ...], Node] = {}


class PrefixTree:
    """Pages by the tokens that lead to them, least recently used first to go."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._roots: dict[bool, Node] = {kind: Node(None, (), -1) for kind in (False, True)}
        # Oldest first. Using a path moves its deepest node first, so that a node is always older
        # than its parent and the oldest evictable node is a leaf.
        self._nodes: OrderedDict[Node, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._nodes)

    def pages(self) -> Iterator[int]:
        """Every page that the tree holds."""
        return (node.page for node in self._nodes)

    def root(self, kind: bool) -> Node:
        """Where paths of a kind begin. kind: do the pages carry the MTP layer."""
        return self._roots[kind]

    def match(self, tokens: Sequence[int], kind: bool) -> list[Node]:
        """The longest path of whole pages before the last token, which is always computed."""
        path: list[Node] = []
        node = self._roots[kind]
        for i in range((len(tokens) - 1) // self.page_size):
            child = node.children.get(self._key(tokens, i, kind))
            if child is None:
                break
            path.append(child)
            node = child
        for node in reversed(path):
            self._nodes.move_to_end(node)
        return path

    def extend(self, node: Node, tokens: Sequence[int], page: int, kind: bool) -> tuple[Node, bool]:
        """The node of the page after `node`'s, and whether it is new and holds `page`.

        tokens: of the request, up to the page's last position at least (with kind: one more).
        """
        key = self._key(tokens, node.depth, kind)
        child = node.children.get(key)
        if child is not None:
            return child, False
        child = node.children[key] = Node(node, key, page)
        self._nodes[child] = None
        self._touch_parents(child)
        return child, True

    def evict(self, count: int, idle: Callable[[int], bool]) -> list[int]:
        """Forget up to `count` pages that nobody else uses (`idle`), and return them."""
        evicted: list[int] = []
        while len(evicted) < count:
            victim = next((n for n in self._nodes if not n.children and idle(n.page)), None)
            if victim is None:
                break
            self._forget(victim)
            evicted.append(victim.page)
        return evicted

    def clear(self) -> list[int]:
        """Forget everything; the pages that were held."""
        pages = list(self.pages())
        self._nodes.clear()
        self._roots = {kind: Node(None, (), -1) for kind in self._roots}
        return pages

    def _key(self, tokens: Sequence[int], depth: int, kind: bool) -> tuple[int, ...]:
        start = depth * self.page_size
        key = tuple(tokens[start : start + self.page_size + kind])
        assert len(key) == self.page_size + kind
        return key

    def _touch_parents(self, node: Node) -> None:
        above = node.parent
        while above is not None and above.parent is not None:
            self._nodes.move_to_end(above)
            above = above.parent

    def _forget(self, node: Node) -> None:
        assert node.parent is not None
        del node.parent.children[node.key]
        del self._nodes[node]
