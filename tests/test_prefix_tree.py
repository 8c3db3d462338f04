"""The prefix tree alone: both tiers against a list of prefixes, the order of eviction, its cost."""

import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm53.prefix import PrefixTree


class Memory:
    """A host tier that moves labels: what a page or a slot holds, None where nobody may look."""

    def __init__(self, capacity):
        self.capacity = capacity
        self.pages, self.slots = {}, {}
        self.broken = False

    def save(self, page, slot, kind):
        if self.broken:
            raise OSError("no host")
        assert self.pages[page][0] == kind
        self.slots[slot] = self.pages[page]

    def load(self, slot, page, kind):
        if self.broken:
            raise OSError("no host")
        assert self.slots[slot][0] == kind
        self.pages[page] = self.slots.pop(slot)


def _prefixes(tokens, kind, size):
    """What every page of `tokens` stands for: kind, then all tokens that it depends on."""
    count = (len(tokens) - kind) // size
    return [(kind, *tokens[: i * size + kind]) for i in range(1, count + 1)]


class Model:
    """The same cache as a flat list of prefixes, each with its tier, last use and users."""

    def __init__(self, capacity):
        self.capacity = capacity
        self.tier, self.used, self.paths = {}, {}, []

    def touch(self, prefix):
        now = next(self.clock)
        for other in self.tier:
            if self.is_above(other, prefix):
                self.used[other] = now

    clock = itertools.count()

    @staticmethod
    def is_above(prefix, other):
        """prefix == other, or other's pages begin with prefix's."""
        pages = (len(other) - 1 - other[0]) // 2
        return prefix in _prefixes(list(other[1:]), other[0], 2)[:pages]

    def leaves(self, tier, below):
        """Idle prefixes of a tier, with nothing of the tiers `below` under them."""
        busy = {prefix for path in self.paths for prefix in path}
        return [
            prefix
            for prefix, own in self.tier.items()
            if own == tier and prefix not in busy
            if not any(
                self.tier[other] in below and other != prefix and self.is_above(prefix, other)
                for other in self.tier
            )
        ]

    def evict(self):
        victim = min(self.leaves("device", {"device"}), key=self.used.__getitem__)
        hosted = [prefix for prefix, tier in self.tier.items() if tier == "host"]
        room = len(hosted) < self.capacity
        if not room and (leaves := self.leaves("host", {"device", "host"})):
            del self.tier[min(leaves, key=self.used.__getitem__)]
            room = True
        if room:
            self.tier[victim] = "host"
        else:
            del self.tier[victim]
        return victim


def _spell(node):
    """The prefix of a node, from the keys on its path."""
    kind, tokens = node.kind, []
    last = node.key[-1:] if kind else ()
    while node.parent is not None:
        tokens = [*node.key[:2], *tokens]
        node = node.parent
    return (kind, *tokens, *last)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_both_tiers_against_a_list_of_prefixes(data):
    """Pages of 2 tokens over 2 ids, so that paths share, split and repeat."""
    capacity = data.draw(st.integers(0, 4))
    memory, model, numbers = Memory(capacity), Model(capacity), itertools.count()
    tree, users = PrefixTree(2, memory if capacity else None), []
    for _ in range(data.draw(st.integers(1, 30))):
        action = data.draw(st.sampled_from(["use", "use", "evict", "evict", "release"]))
        if action == "use":
            tokens = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=9))
            kind, blind = data.draw(st.booleans()), data.draw(st.booleans())
            spelled = _prefixes(tokens, kind, 2)
            path = tree.match(tokens, kind, len(spelled))
            known = list(itertools.takewhile(lambda p: p in model.tier, spelled))
            assert [_spell(node) for node in path] == known
            if blind:  # computes everything itself, as a request with prompt_logprobs does
                path = []
            tree.acquire(path)
            for node, prefix in zip(path, spelled, strict=False):
                if node.page is None:
                    tree.restore(node, next(numbers))
                    model.tier[prefix] = "device"
                assert memory.pages[node.page] == prefix
            own = spelled[: len(path)]
            model.paths.append(own)
            for prefix in spelled[len(path) :]:
                page = next(numbers)
                memory.pages[page] = prefix
                node, is_new = tree.extend(path[-1] if path else tree.root(kind), tokens, page)
                assert is_new == (model.tier.get(prefix) != "device")
                assert (node.page == page) == is_new and memory.pages[node.page] == prefix
                model.tier[prefix] = "device"
                if is_new:
                    model.touch(prefix)
                tree.acquire([node])
                path.append(node)
                own.append(prefix)
            users.append(path)
        elif action == "release" and users:
            i = data.draw(st.integers(0, len(users) - 1))
            tree.release(users.pop(i))
            path = model.paths.pop(i)
            if path:
                model.touch(path[-1])
        elif action == "evict" and tree.num_idle:
            page = tree.evict()
            assert memory.pages.pop(page) == model.evict()
        tiers = {_spell(node): "host" if node.page is None else "device" for node in tree.nodes()}
        assert tiers == model.tier
        busy = {prefix for path in model.paths for prefix in path}
        on_device = [p for p, tier in tiers.items() if tier == "device"]
        assert (len(tree), tree.num_idle) == (len(on_device), len(set(on_device) - busy))
        assert sorted(tree.pages()) == sorted(n.page for n in tree.nodes() if n.page is not None)
        slots = [node.slot for node in tree.nodes() if node.slot is not None]
        assert len(slots) == len(set(slots)) <= capacity
    held = list(tree.pages())
    assert sorted(tree.clear()) == sorted(held)
    assert list(tree.nodes()) == [] and len(tree) == tree.num_idle == 0


def _enter(tree, tokens, first_page):
    """A path of new pages that nobody uses."""
    node = tree.root(False)
    for i in range(len(tokens) // tree.page_size):
        node, _ = tree.extend(node, tokens, first_page + i)


def test_the_least_recently_used_leaf_goes_first():
    tree = PrefixTree(1)
    _enter(tree, [1, 2, 3], 10)
    _enter(tree, [1, 4], 13 - 1)
    path = tree.match([1, 2, 3, 9], False, 3)
    assert [node.page for node in path] == [10, 11, 12]
    tree.acquire(path)
    tree.release(path)
    assert tree.evict() == 13
    tree.acquire(path[:2])
    assert tree.num_idle == 1 and tree.evict() == 12
    tree.release(path[:2])
    assert [tree.evict(), tree.evict()] == [11, 10]
    assert tree.num_idle == 0


def test_a_tier_that_fails_loses_nothing():
    memory = Memory(2)
    tree = PrefixTree(1, memory)
    memory.pages[7] = (False, 1)
    _enter(tree, [1], 7)
    memory.broken = True
    with pytest.raises(OSError, match="no host"):
        tree.evict()
    memory.broken = False
    assert (len(tree), tree.num_idle) == (1, 1)
    assert tree.evict() == 7 and tree.num_to_host == 1
    (node,) = path = tree.match([1], False, 1)
    tree.acquire(path)
    memory.broken = True
    with pytest.raises(OSError, match="no host"):
        tree.restore(node, 3)
    memory.broken = False
    tree.restore(node, 3)
    assert node.page == 3 and memory.pages[3] == (False, 1) and tree.num_from_host == 1


@pytest.mark.parametrize("paths, depth", [(1, 20_000), (20_000, 1), (100, 200)])
def test_twenty_thousand_nodes_cost_little(paths, depth):
    """A hundredth of a second or so a thousand: linear work for a page would take minutes."""
    tree = PrefixTree(1, Memory(0))
    tokens = [[path] + [0] * (depth - 1) for path in range(paths)]
    started = time.process_time()
    for path, ids in enumerate(tokens):
        node = tree.root(False)
        for i in range(depth):
            node, _ = tree.extend(node, ids, path * depth + i)
    assert len(tree) == tree.num_idle == 20_000
    # Eviction below a path in use, with everything used again and again.
    busy = tree.match(tokens[0], False, depth)
    tree.acquire(busy)
    for _ in range(20):
        for ids in tokens[-5:]:
            path = tree.match(ids, False, min(depth, 200))
            tree.acquire(path)
            tree.release(path)
    evicted = [tree.evict() for _ in range(tree.num_idle)]
    tree.release(busy)
    evicted += [tree.evict() for _ in range(tree.num_idle)]
    assert sorted(evicted) == list(range(20_000)) and len(tree) == 0
    assert time.process_time() - started < 5
