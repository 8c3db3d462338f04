"""Which rows the next step computes: continuous batching over a paged cache. Host side, no nn.

Order of a step: decode rows first, then the chunks of prompts that are under way, then waiting
requests, oldest first each time, within a budget of rows per step. A request is admitted when the
pages of all its tokens are free, so only decoding grows; when a page is missing then, the request
that was admitted last gives up its pages and waits in front of the queue to be recomputed. The
oldest request can always go on, so every step makes progress.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from glm53.cache import PAGE_SIZE, PagePool
from glm53.request import Request


def pages_for(num_tokens: int) -> int:
    """Pages that hold so many tokens."""
    return -(-num_tokens // PAGE_SIZE)


@dataclass(frozen=True, slots=True)
class Chunk:
    """`count` rows of a request, from position `request.num_computed` on."""

    request: Request
    count: int


class Scheduler:
    """Requests, oldest first, and their pages."""

    def __init__(self, pool: PagePool, *, max_batch_tokens: int, max_running: int) -> None:
        """max_batch_tokens: rows of a step at most; max_running: requests that hold pages."""
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
        self.num_preemptions = 0

    def __iter__(self) -> Iterator[Request]:
        yield from self.running
        yield from self.waiting

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
        for request in list(self.running):
            # A request preempted for an earlier one in this loop no longer runs.
            if request.pages and request.num_remaining == 1 and self._grow(request):
                chunks.append(Chunk(request, 1))
                budget -= 1
        for request in self.running:
            if budget and request.num_remaining > 1:
                chunks.append(Chunk(request, min(request.num_remaining, budget)))
                budget -= chunks[-1].count
        while budget and self.waiting and len(self.running) < self.max_running:
            request = self.waiting[0]
            pages = self.pool.allocate(pages_for(len(request.tokens)))
            if pages is None:
                break
            request.pages = pages
            self.running.append(self.waiting.popleft())
            chunks.append(Chunk(request, min(request.num_remaining, budget)))
            budget -= chunks[-1].count
        return chunks

    def _grow(self, request: Request) -> bool:
        """A page for the request's next row, taken from the newest requests if need be.

        False: the request was itself the newest and had to give up its own.
        """
        while len(request.pages) < pages_for(len(request.tokens)):
            pages = self.pool.allocate(1)
            if pages is not None:
                request.pages += pages
                continue
            newest = self.running.pop()
            self._free(newest)
            newest.num_computed = 0
            newest.preemptions += 1
            self.num_preemptions += 1
            self.waiting.appendleft(newest)
            if newest is request:
                return False
        return True

    def _free(self, request: Request) -> None:
        self.pool.release(request.pages)
        request.pages = []
