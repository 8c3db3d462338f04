"""Which rows the next step computes: continuous batching over a paged cache. Host side, no nn.

Order of a step: decode rows first, then the chunks of prompts that are under way, then waiting
requests, oldest first each time, within a budget of rows per step. A request is admitted when the
pages of all its tokens are free, so only decoding grows; when a page is missing then, the request
that was admitted last gives up its pages and waits in front of the queue to be recomputed. The
oldest request can always go on, so every step makes progress.

Full pages are shared: a request starts with the pages that the prefix tree has for its tokens, and
enters its own as they fill. Pages that only the tree holds count as free.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from glm53.cache import PAGE_SIZE, PagePool
from glm53.prefix import HostTier, Node, PrefixTree
from glm53.request import Request


def pages_for(num_tokens: int) -> int:
    """Pages that hold so many tokens."""
    return -(-num_tokens // PAGE_SIZE)


@dataclass(frozen=True, slots=True)
class Chunk:
    """`count` rows of a request, from position `request.num_computed` on, then its drafts."""

    request: Request
    count: int
    drafts: tuple[int, ...] = ()

    @property
    def token_ids(self) -> list[int]:
        start = self.request.num_computed
        return [*self.request.tokens[start : start + self.count], *self.drafts]


class Scheduler:
    """Requests, oldest first, and their pages, some of which the prefix tree holds as well."""

    def __init__(
        self,
        pool: PagePool,
        *,
        max_batch_tokens: int,
        max_running: int,
        prefix_caching: bool = True,
        host: HostTier | None = None,
    ) -> None:
        """max_batch_tokens: rows of a step at most; max_running: requests that hold pages;
        prefix_caching: keep full pages of finished requests for later ones; host: where they go
        when the pool has no room."""
        if max_running < 1:
            raise ValueError(f"max_running={max_running}: must be at least 1")
        if max_batch_tokens < max_running:
            raise ValueError(
                f"max_batch_tokens={max_batch_tokens}: must be at least max_running="
                f"{max_running}, so that a step can hold a row of every running request"
            )
        self.pool = pool
        self.max_batch_tokens = max_batch_tokens
        self.max_running = max_running
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in order of admission
        self.prefix = PrefixTree(PAGE_SIZE, host) if prefix_caching else None
        self.num_preemptions = self.num_evictions = 0
        self.num_prompt_tokens = self.num_cached_tokens = self.num_host_cached_tokens = 0

    def __iter__(self) -> Iterator[Request]:
        # Copies: a hook may add requests while somebody looks for one.
        yield from [*self.running, *self.waiting]

    def counters(self) -> dict[str, int]:
        """What is counted here and in the prefix tree, by the names of EngineStats."""
        prefix = self.prefix
        return {
            "preemptions": self.num_preemptions,
            "prompt_tokens": self.num_prompt_tokens,
            "cached_tokens": self.num_cached_tokens,
            "host_cached_tokens": self.num_host_cached_tokens,
            "evictions": self.num_evictions,
            "pages_to_host": 0 if prefix is None else prefix.num_to_host,
            "pages_from_host": 0 if prefix is None else prefix.num_from_host,
            "host_evictions": 0 if prefix is None else prefix.num_host_evictions,
        }

    def add(self, request: Request) -> None:
        """Queue a request.

        ValueError: the whole cache is smaller than what the request may need.
        """
        # The last token is never fed back, so its keys need no slot.
        needed = pages_for(request.max_tokens - (not request.prompt_only))
        if needed > self.pool.num_pages:
            raise ValueError(
                f"prompt and max_new_tokens need {needed * PAGE_SIZE} tokens of cache, the cache "
                f"holds {self.pool.num_pages * PAGE_SIZE}"
            )
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """Forget a request that has ended, and free its pages."""
        if request in self.running:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        self._free(request)

    def schedule(self) -> list[Chunk]:
        """The rows of the next step, with pages for all of them; empty if nothing waits."""
        chunks: list[Chunk] = []
        budget = self.max_batch_tokens
        decoding = [request for request in self.running if request.num_remaining == 1]
        # Every request gets its row before any gets rows for drafts.
        for request in decoding:
            # A request preempted for an earlier one in this loop no longer runs.
            if request.pages:
                self._grow(request)
        decoding = [request for request in decoding if request.pages]
        for i, request in enumerate(decoding):
            rows_of_others = len(decoding) - i - 1
            drafts = tuple(request.drafts[: budget - 1 - rows_of_others])
            chunks.append(Chunk(request, 1, drafts))
            budget -= 1 + len(drafts)
        for request in self.running:
            if budget and request.num_remaining > 1:
                chunks.append(Chunk(request, min(request.num_remaining, budget)))
                budget -= chunks[-1].count
        for request in list(self.waiting):
            if not budget or len(self.running) == self.max_running:
                break
            if self._waits_for_sibling(request):
                continue
            if not self._admit(request):
                break
            chunks.append(Chunk(request, min(request.num_remaining, budget)))
            budget -= chunks[-1].count
        return chunks

    def share(self, request: Request) -> None:
        """Enter the request's full pages into the prefix tree, for requests to come."""
        if self.prefix is None or request.prefix_path is None:
            return
        # The row of the MTP layer at a page's end needs the token after it.
        known = min(request.num_computed, len(request.tokens) - request.speculates)
        num_pages = min(known // PAGE_SIZE, len(request.pages))
        self._enter(
            request.prefix_path, request.pages, request.tokens, request.speculates, num_pages
        )

    def insert(
        self,
        tokens: Sequence[int],
        kind: bool,
        num_pages: int,
        fill: Callable[[int | None], None],
    ) -> None:
        """Enter pages computed elsewhere, all of them or none.

        tokens, kind: what they hold, see PrefixTree. fill: called for each in turn, with the page
        to be written, or None where the tree has it already; what it raises is passed on.
        MemoryError: running requests leave no room for so many.
        """
        assert self.prefix is not None
        path = [n for n in self.prefix.match(tokens, kind, num_pages) if n.page is not None]
        pages = self._take(path, len(path))
        assert pages is not None
        try:
            for i in range(num_pages):
                if i < len(path):
                    fill(None)
                    continue
                page = self._allocate(1)
                if page is None:
                    raise MemoryError(
                        f"the prefix needs {num_pages} pages of the cache; of its "
                        f"{self.pool.num_pages}, running requests leave {len(pages)}"
                    )
                pages += page
                fill(page[0])
            self._enter(path, pages, tokens, kind, num_pages)
        finally:
            self.pool.release(pages)
            self.prefix.release(path)

    def drop_prefixes(self) -> None:
        """Forget every shared page; running requests keep theirs, and share nothing any more."""
        if self.prefix is not None:
            self.pool.release(self.prefix.clear())
            for request in self.running:
                request.prefix_path = None

    def reserve(self, request: Request, num_tokens: int) -> int:
        """Pages for so many tokens of a running request, as far as free and cached pages go.

        Returns how many tokens its pages hold now. Nothing is preempted: this is for drafts.
        """
        missing = max(0, pages_for(num_tokens) - len(request.pages))
        request.pages += self._allocate(min(missing, self._num_available)) or []
        return len(request.pages) * PAGE_SIZE

    def _waits_for_sibling(self, request: Request) -> bool:
        """Completions of one prompt wait until the first has computed what they can share."""
        return (
            self.prefix is not None
            and not request.computes_every_row
            and request.prompt_length > PAGE_SIZE
            and any(
                other.request_id == request.request_id
                and other.num_computed < other.prompt_length - 1
                for other in self.running
            )
        )

    def _admit(self, request: Request) -> bool:
        path: list[Node] = []
        if self.prefix is not None and not request.computes_every_row:
            # The last token is always computed: its logits are wanted.
            num_pages = (len(request.tokens) - 1) // PAGE_SIZE
            path = self.prefix.match(request.tokens, request.speculates, num_pages)
        on_host = sum(node.page is None for node in path)
        pages = self._take(path, pages_for(len(request.tokens)))
        if pages is None:
            return False
        request.pages = pages
        # Keys of rows with replayed decisions are not what another request would compute.
        request.prefix_path = path if request.replay is None else None
        request.num_computed = len(path) * PAGE_SIZE
        if not request.preemptions:
            request.num_cached = request.num_computed
            self.num_prompt_tokens += request.prompt_length
            self.num_cached_tokens += request.num_cached
            self.num_host_cached_tokens += on_host * PAGE_SIZE
        self.waiting.remove(request)
        self.running.append(request)
        return True

    def _take(self, path: list[Node], num_pages: int) -> list[int] | None:
        """Pages, the first of them those of a path of the tree, which is in use from then on.

        None, and no change, if there are not so many.
        """
        if self.prefix is None:
            return self._allocate(num_pages)
        self.prefix.acquire(path)  # first of all: nothing may evict it now
        pages = [node.page for node in path if node.page is not None]
        self.pool.share(pages)
        complete = False
        try:
            own = self._allocate(num_pages - len(pages))
            if own is not None:
                on_host = path[len(pages) :]
                pages += own
                for node, page in zip(on_host, own, strict=False):
                    self.prefix.restore(node, page)
                    self.pool.share([page])
                complete = True
        finally:
            if not complete:
                self.pool.release(pages)
                self.prefix.release(path)
        return pages if complete else None

    def _enter(
        self, path: list[Node], pages: list[int], tokens: Sequence[int], kind: bool, num_pages: int
    ) -> None:
        """Lengthen a path in use to `num_pages`: the first of `pages`, which hold `tokens`.

        A page that the tree has got from another request meanwhile takes the place of one's own:
        a node in use is a page in use.
        """
        assert self.prefix is not None
        for i in range(len(path), num_pages):
            node, is_new = self.prefix.extend(
                path[-1] if path else self.prefix.root(kind), tokens, pages[i]
            )
            assert node.page is not None
            self.pool.share([node.page])
            if not is_new:
                self.pool.release([pages[i]])
                pages[i] = node.page
            self.prefix.acquire([node])
            path.append(node)

    @property
    def _num_available(self) -> int:
        """Pages that nobody holds but the prefix tree."""
        return self.pool.num_free + (0 if self.prefix is None else self.prefix.num_idle)

    def _allocate(self, count: int) -> list[int] | None:
        """Free pages, or those that only the prefix tree holds; None, and no change, if there are
        not so many."""
        if count > self._num_available:
            return None
        while self.pool.num_free < count:
            assert self.prefix is not None
            self.pool.release([self.prefix.evict()])
            self.num_evictions += 1
        return self.pool.allocate(count)

    def _grow(self, request: Request) -> None:
        """A page for the request's next row, taken from drafts or the newest requests if need be.

        A request that is itself the newest may have to give up its own pages.
        """
        while len(request.pages) < pages_for(len(request.tokens)):
            pages = self._allocate(1)
            if pages is not None:
                request.pages += pages
                continue
            if self._drop_drafts():
                continue
            newest = self.running.pop()
            self._free(newest)
            newest.num_computed = 0
            newest.drafts = []
            newest.preemptions += 1
            self.num_preemptions += 1
            self.waiting.appendleft(newest)
            if newest is request:
                return

    def _drop_drafts(self) -> bool:
        """Free one page that a request holds for drafts only, if there is any."""
        for request in reversed(self.running):
            if len(request.pages) > pages_for(len(request.tokens)):
                self.pool.release([request.pages.pop()])
                del request.drafts[len(request.pages) * PAGE_SIZE - len(request.tokens) :]
                return True
        return False

    def _free(self, request: Request) -> None:
        self.pool.release(request.pages)
        if self.prefix is not None and request.prefix_path:
            self.prefix.release(request.prefix_path)
        request.pages = []
        request.prefix_path = []
