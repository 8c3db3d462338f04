"""Pages of a prompt as a byte stream: from one instance of a model to another, in another process.

Reading and writing need no seeking, so a pipe or a socket's file does as well as a file on disk.
All numbers are little-endian; nothing is unpickled.

    magic            8 bytes, "glm53kv" and the version, 1
    header length    uint32
    header CRC-32    uint32, of the header
    header           JSON object: `layout` (byte order, dtype, page size, rows of each layer),
                     `weights` (see `weight_fingerprint`), `batch invariant` (null, or what the
                     bits depend on, see `tiles.conditions`), `mtp`, `num_pages`
    token ids        uint32 each: page size * num_pages, and one more if there are pages and `mtp`
    CRC-32           uint32, of the token ids, continuing that of the header
    num_pages times
      page           its bytes as KVCache.read_page gives them: of every layer the latents, then the
                     index keys; with the MTP layer's if `mtp`
      CRC-32         uint32, of the page, continuing the one before

The sums continue each other, so a page in another's place is found as a changed bit is. A stream
ends with its last page; another may follow.
"""

import io
import json
import struct
import sys
import zlib
from collections.abc import Sequence
from typing import Any, BinaryIO

import torch
from torch import Tensor

from glm53.cache import PAGE_SIZE, KVCache
from glm53.scheduler import Scheduler

MAGIC = b"glm53kv\x01"
_MAX_HEADER = 1 << 16  # bytes; one row of numbers for each layer


def check_file(file: BinaryIO, method: str) -> None:
    """ValueError unless it is a binary file with that method, "read" or "write"."""
    if isinstance(file, io.TextIOBase) or not callable(getattr(file, method, None)):
        raise ValueError(f"file={file!r}: must be binary, with `{method}`")


def _layout(cache: KVCache, mtp: bool) -> dict[str, Any]:
    layers = cache.layers[: len(cache.layers) - (cache.mtp and not mtp)]
    return {
        "byte order": sys.byteorder,
        "dtype": str(cache.dtype).removeprefix("torch."),
        "page size": PAGE_SIZE,
        "latent widths": [layer.latent.shape[1] for layer in layers],
        "index key widths": [
            0 if layer.index_keys is None else layer.index_keys.shape[1] for layer in layers
        ],
    }


def export_pages(
    file: BinaryIO,
    scheduler: Scheduler,
    cache: KVCache,
    weights: str,
    conditions: dict[str, str | int] | None,
    tokens: Sequence[int],
    *,
    mtp: bool,
) -> int:
    """Write the pages that `tokens` fill, which have just been computed; their number of tokens.

    weights: the fingerprint; conditions: under which the pages are batch-invariant, None if they
    are not; mtp: pages of which kind.
    """
    assert scheduler.prefix is not None
    num_pages = (len(tokens) - mtp) // PAGE_SIZE
    pages = [node.page for node in scheduler.prefix.match(tokens, mtp, num_pages)]
    if len(pages) < num_pages:
        raise RuntimeError("the weights changed while the prefix was computed")
    header = {
        "layout": _layout(cache, mtp),
        "weights": weights,
        "batch invariant": conditions,
        "mtp": mtp,
        "num_pages": num_pages,
    }
    encoded = json.dumps(header).encode()
    checksum = zlib.crc32(encoded)
    _write(file, MAGIC + struct.pack("<II", len(encoded), checksum) + encoded)
    num_tokens = _num_tokens(num_pages, mtp)
    ids = struct.pack(f"<{num_tokens}I", *tokens[:num_tokens])
    checksum = zlib.crc32(ids, checksum)
    _write(file, ids + struct.pack("<I", checksum))
    data = torch.empty(cache.page_bytes(mtp=mtp), dtype=torch.uint8)
    for page in pages:
        assert page is not None, "what was just computed is on the device"
        cache.read_page(page, data, mtp=mtp)
        content = data.numpy().tobytes()
        checksum = zlib.crc32(content, checksum)
        _write(file, content + struct.pack("<I", checksum))
    file.flush()
    return num_pages * PAGE_SIZE


def import_pages(
    file: BinaryIO,
    scheduler: Scheduler,
    cache: KVCache,
    weights: str,
    conditions: dict[str, str | int] | None,
    *,
    vocab_size: int,
) -> int:
    """Enter what `export_pages` wrote into the prefix tree, all of it or nothing; its tokens.

    weights: the fingerprint of the reader's own; conditions: those under which its results are
    batch-invariant, None if they need not be. ValueError, naming what differs: no such stream, a
    damaged one, one from another layout, other weights or conditions, or with more pages than the
    whole cache.
    """
    reader = _PrefixReader(file, cache, weights, conditions, vocab_size)

    def fill(page: int | None) -> None:
        content = reader.read_page()
        if page is not None:
            cache.write_page(page, content, mtp=reader.mtp)

    scheduler.insert(reader.tokens, reader.mtp, reader.num_pages, fill)
    return reader.num_pages * PAGE_SIZE


class _PrefixReader:
    """A stream, checked piece by piece against the cache and the weights that it is for."""

    def __init__(
        self,
        file: BinaryIO,
        cache: KVCache,
        weights: str,
        conditions: dict[str, str | int] | None,
        vocab_size: int,
    ) -> None:
        """Reads up to the first page."""
        self._file = file
        if self._read(len(MAGIC), "magic") != MAGIC:
            raise ValueError("not a stream of cache pages, or one of another version")
        length, checksum = struct.unpack("<II", self._read(8, "header"))
        if length > _MAX_HEADER:
            raise ValueError(f"damaged stream: a header of {length} bytes")
        encoded = self._read(length, "header")
        self._checksum = 0
        self._check(encoded, struct.pack("<I", checksum), "header")
        self.mtp, self.num_pages = _check_header(encoded, cache, weights, conditions)
        num_tokens = _num_tokens(self.num_pages, self.mtp)
        ids = self._read(4 * num_tokens, "token ids")
        self._check(ids, self._read(4, "token ids"), "token ids")
        self.tokens = list(struct.unpack(f"<{num_tokens}I", ids))
        if max(self.tokens, default=0) >= vocab_size:
            raise ValueError(f"token id {max(self.tokens)} is outside 0..{vocab_size - 1}")
        self._page_bytes = cache.page_bytes(mtp=self.mtp)
        self._num_read = 0
        if not self.num_pages:
            self._check_end()

    def read_page(self) -> Tensor:
        """The next page's bytes, uint8."""
        what = f"page {self._num_read}"
        content = self._read(self._page_bytes, what)
        self._check(content, self._read(4, what), what)
        self._num_read += 1
        if self._num_read == self.num_pages:
            self._check_end()
        return torch.frombuffer(content, dtype=torch.uint8)

    def _read(self, size: int, what: str) -> bytearray:
        content = bytearray()
        while len(content) < size:  # a pipe gives what it has
            piece = self._file.read(size - len(content))
            if not isinstance(piece, bytes) or not piece:
                raise ValueError(
                    f"truncated stream: {what} has {len(content)} of {size} bytes"
                    if isinstance(piece, bytes)
                    else f"the file gave {type(piece).__name__}: open it binary and blocking"
                )
            content += piece
        return content

    def _check(self, content: bytearray, stored: bytes | bytearray, what: str) -> None:
        self._checksum = zlib.crc32(content, self._checksum)
        if struct.pack("<I", self._checksum) != stored:
            raise ValueError(f"damaged stream: the checksum of {what} is wrong")

    def _check_end(self) -> None:
        """Nothing follows but another stream; a pipe may have to be waited for, so only a file is
        looked at."""
        if self._file.seekable():
            end = self._file.tell()
            following = self._file.read(len(MAGIC))
            self._file.seek(end)
            if following not in (b"", MAGIC):
                raise ValueError("the stream is followed by bytes that belong to none")


def _check_header(
    encoded: bytearray,
    cache: KVCache,
    weights: str,
    conditions: dict[str, str | int] | None,
) -> tuple[bool, int]:
    """`mtp` and `num_pages`, when everything fits. The sum is right, but anybody can sum."""
    try:
        header = json.loads(encoded.decode())
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict) or not isinstance(header.get("layout"), dict):
        raise ValueError("damaged stream: its header is not what this version writes")
    mtp, num_pages = header.get("mtp"), header.get("num_pages")
    if not isinstance(mtp, bool) or type(num_pages) is not int or num_pages < 0:
        raise ValueError(f"damaged stream: mtp={mtp!r}, num_pages={num_pages!r}")
    if mtp and not cache.mtp:
        raise ValueError("mtp: the stream has pages of the MTP layer, which this model has not")
    for name, ours in _layout(cache, mtp).items():
        theirs = header["layout"].get(name)
        if theirs != ours:
            raise ValueError(f"{name}: the stream has {theirs!r}, this cache {ours!r}")
    if header.get("weights") != weights:
        raise ValueError(
            f"weights: the stream is of a model with fingerprint {header.get('weights')!r}, this "
            f"one has {weights!r}"
        )
    if conditions is not None:
        _check_conditions(header.get("batch invariant"), conditions)
    if num_pages > cache.num_pages:
        raise ValueError(f"the stream has {num_pages} pages, the whole cache {cache.num_pages}")
    return mtp, num_pages


def _check_conditions(theirs: Any, ours: dict[str, str | int]) -> None:
    """The promise of batch_invariant covers pages from elsewhere too."""
    if not isinstance(theirs, dict):
        raise ValueError(
            "batch_invariant: the stream is of an engine without it, its pages may differ in their "
            "last bits from those of this one"
        )
    for name, value in ours.items():
        if theirs.get(name) != value:
            raise ValueError(
                f"batch_invariant: bits depend on the {name}; the stream has {theirs.get(name)!r}, "
                f"this engine {value!r}"
            )


def _num_tokens(num_pages: int, mtp: bool) -> int:
    return PAGE_SIZE * num_pages + bool(num_pages and mtp)


def _write(file: BinaryIO, content: bytes) -> None:
    rest = memoryview(content)
    while rest:  # a pipe takes what it has room for
        try:
            count = file.write(rest)
        except TypeError as error:
            raise ValueError(f"file={file!r}: must be binary: {error}") from error
        if not count:
            raise ValueError(f"the file took {count} of {len(rest)} bytes: open it blocking")
        rest = rest[count:]
