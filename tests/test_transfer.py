"""Prefixes from one model instance to another: what arrives, and what is refused."""

import io
import json
import os
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import zlib
from pathlib import Path

import pytest
import torch

import glm53
from glm53 import GLM53, SamplingParams
from glm53.cache import PAGE_SIZE
from glm53.config import GLM53Config
from glm53.transfer import MAGIC
from glm53.weights import weight_fingerprint
from tests.engines import assert_idle, greedy, prompts_of, tiny_model, with_engine
from tests.speculation import assert_mixed, force_drafts

NANO = Path(glm53.__file__).parent / "data" / "nano"
NEW = 6
PLAIN = SamplingParams(temperature=0, max_new_tokens=NEW, ignore_eos=True, speculative_tokens=0)
# fp32, 4 layers: latents of 20 + 6, 3 index keys of 14; the MTP layer has one more of both.
PAGE_BYTES = {False: 64 * 4 * (4 * 26 + 3 * 14), True: 64 * 4 * (5 * 26 + 4 * 14)}


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def prompt():
    return prompts_of(150)[0]


@pytest.fixture(scope="module")
def stream(model, prompt):
    """Two pages without the MTP layer."""
    file = io.BytesIO()
    assert with_engine(model).export_prefix(prompt, file, mtp=False) == 128
    return file.getvalue()


def _ids(completion):
    return list(completion.token_ids)


class Pipe:
    """Cannot seek, and reads and writes less than it is asked to."""

    def __init__(self, content=b""):
        self.content, self.flushed = bytearray(content), False

    def seekable(self):
        return False

    def read(self, size):
        piece = bytes(self.content[: min(size, 1000)])
        del self.content[: len(piece)]
        return piece

    def write(self, piece):
        self.content += piece[:777]
        return min(len(piece), 777)

    def flush(self):
        self.flushed = True


@pytest.mark.parametrize("speculative", [0, 3])
@pytest.mark.parametrize("length", [63, 64, 65, 128, 129, 150])
def test_an_imported_prefix_is_as_good_as_ones_own(model, length, speculative):
    (prompt,), kind = prompts_of(length, seed=length), bool(speculative)
    pipe = Pipe()
    sender, receiver = with_engine(model), with_engine(model)
    tokens = sender.export_prefix(prompt, pipe, mtp=kind)
    assert tokens == (length - kind) // PAGE_SIZE * PAGE_SIZE and pipe.flushed
    assert sender.engine().stats.rows == length
    pages = tokens // PAGE_SIZE
    header = struct.unpack_from("<I", pipe.content, len(MAGIC))[0]
    ids = 4 * (tokens + (kind and tokens > 0))
    assert len(pipe.content) == 16 + header + ids + 4 + pages * (PAGE_BYTES[kind] + 4)
    assert_idle(sender.engine())
    assert receiver.import_prefix(pipe) == tokens and not pipe.content
    assert_idle(receiver.engine())
    params = SamplingParams.override(PLAIN, speculative_tokens=speculative)
    longer = [*prompt, 9]
    output = greedy(model, longer, NEW)
    force_drafts(receiver.engine(), [longer + output])
    completion = receiver.generate(longer, params)
    assert completion.metrics.cached_tokens == tokens
    metrics = completion.metrics
    expected = length + 1 - tokens + metrics.decode_steps - 1 + metrics.drafted
    assert receiver.engine().stats.rows == expected
    assert _ids(completion) == output
    if kind:
        assert_mixed([completion])
    assert_idle(receiver.engine())


def test_by_default_pages_serve_the_default_of_generate(model, prompt):
    file = io.BytesIO()
    with_engine(model).export_prefix(prompt, file)
    own = with_engine(model)
    own.import_prefix(io.BytesIO(file.getvalue()))
    force_drafts(own.engine(), [prompt + greedy(model, prompt, 8)])
    completion = own.generate(prompt, max_new_tokens=8, temperature=0, ignore_eos=True)
    assert completion.metrics.cached_tokens == 128
    assert_mixed([completion])
    assert own.generate(prompt, PLAIN).metrics.cached_tokens == 0, "speculation only"
    without = tiny_model(overrides={"num_nextn_predict_layers": 0})
    file = io.BytesIO()
    without.export_prefix(prompt, file)
    own = with_engine(without)
    own.import_prefix(io.BytesIO(file.getvalue()))
    assert own.generate(prompt, max_new_tokens=4).metrics.cached_tokens == 128
    with pytest.raises(ValueError, match="mtp=True: this checkpoint has no MTP layer"):
        without.export_prefix(prompt, io.BytesIO(), mtp=True)


def test_export_computes_only_what_is_missing(model, prompt):
    own = with_engine(model)
    own.generate(prompt, PLAIN)
    before = own.engine().stats.rows
    own.export_prefix(prompt, io.BytesIO(), mtp=False)
    assert own.engine().stats.rows - before == 150 - 128


def test_what_is_there_already_stays(model, prompt, stream):
    """Pages of both kinds of origin in one path; a second import changes nothing."""
    own = with_engine(model)
    own.generate(prompt[:100], PLAIN)
    (first,) = own.engine().scheduler.prefix.pages()
    for _ in range(2):
        own.import_prefix(io.BytesIO(stream))
        path = own.engine().scheduler.prefix.match(prompt, False, 2)
        assert len(path) == 2 and path[0].page == first
        assert_idle(own.engine())
    assert _ids(own.generate(prompt, PLAIN)) == greedy(model, prompt, NEW)


def test_pages_on_the_host_are_written_and_taken_over(model, prompt, stream):
    host_bytes = 20 * PAGE_BYTES[True]
    own = with_engine(model, kv_cache_tokens=3 * PAGE_SIZE, prefix_host_bytes=host_bytes)
    own.generate(prompt, PLAIN)
    own.generate(prompts_of(150, seed=8)[0], PLAIN)
    prefix = own.engine().scheduler.prefix
    assert [node.page is None for node in prefix.match(prompt, False, 2)] == [True] * 2
    file = io.BytesIO()
    own.export_prefix(prompt, file, mtp=False)
    assert file.getvalue()[: len(stream) // 4] == stream[: len(stream) // 4]
    own.generate(prompts_of(150, seed=8)[0], PLAIN)
    own.import_prefix(io.BytesIO(stream))
    assert [node.slot is None for node in prefix.match(prompt, False, 2)] == [True] * 2
    assert_idle(own.engine())
    assert _ids(own.generate(prompt, PLAIN)) == greedy(model, prompt, NEW)


def test_import_evicts_old_pages_but_takes_none_from_requests(model, prompt, stream):
    own = with_engine(model, kv_cache_tokens=4 * PAGE_SIZE)
    for other in prompts_of(150, 150, seed=4):
        own.generate(other, PLAIN)
    assert own.import_prefix(io.BytesIO(stream)) == 128
    assert own.engine().stats.evictions > 0
    assert own.generate(prompt, PLAIN).metrics.cached_tokens == 128
    engine = own.engine()
    running = engine.add(prompts_of(180, seed=5)[0], SamplingParams.override(PLAIN))
    engine.step()
    with pytest.raises(MemoryError, match=r"needs 2 pages of the cache; of its 4, running .* 1"):
        own.import_prefix(io.BytesIO(stream))
    (completion,) = engine.run()[running]
    assert _ids(completion) == greedy(model, prompts_of(180, seed=5)[0], NEW)
    assert_idle(engine)
    small = with_engine(model, kv_cache_tokens=PAGE_SIZE)
    with pytest.raises(ValueError, match="the stream has 2 pages, the whole cache 1"):
        small.import_prefix(io.BytesIO(stream))


def _refused(own, content, match, file=io.BytesIO):
    prefix, pool = own.engine().scheduler.prefix, own.engine().pool
    with pytest.raises(ValueError, match=match):
        own.import_prefix(file(content))
    assert len(prefix) == 0 and list(prefix.nodes()) == []
    assert pool.num_free == pool.num_pages


def test_a_flipped_bit_anywhere_is_found(model, stream):
    own = with_engine(model)
    page = PAGE_BYTES[False] + 4
    pages = len(stream) - 2 * page
    # All up to the pages; of the pages first, middle and last bytes, sums included.
    places = [*range(0, 16), *range(16, pages, 7), *range(pages - 12, pages + 3)]
    places += [*range(pages + page - 7, pages + page + 3), pages + page // 2]
    places += [*range(len(stream) - 7, len(stream)), pages + page + page // 3]
    for i, place in enumerate(places):
        broken = bytearray(stream)
        broken[place] ^= 1 << i % 8
        _refused(own, broken, "stream")


def test_a_stream_that_ends_early_or_late_is_refused(model, stream):
    own = with_engine(model)
    page = PAGE_BYTES[False] + 4
    for end in (0, 7, 8, 11, 16, 100, len(stream) - 2 * page - 2, len(stream) - page):
        for file in (io.BytesIO, Pipe):
            _refused(own, stream[:end], "truncated stream", file)
    _refused(own, stream[:-1], "truncated stream: page 1 has 3 of 4 bytes")
    _refused(own, stream + b"x", "followed by bytes that belong to none")
    _refused(own, stream + stream[1:], "followed by bytes")


def test_pages_in_another_order_are_refused(model, stream):
    page = PAGE_BYTES[False] + 4
    head, first, second = stream[: -2 * page], stream[-2 * page : -page], stream[-page:]
    _refused(with_engine(model), head + second + first, "checksum of page 0")
    _refused(with_engine(model), head + first + first, "checksum of page 1")


def test_streams_may_follow_one_another(model, stream):
    (other,) = prompts_of(200, seed=6)
    file = io.BytesIO(stream)
    file.seek(0, io.SEEK_END)
    with_engine(model).export_prefix(other, file, mtp=False)
    for make in (io.BytesIO, Pipe):
        own, both = with_engine(model), make(file.getvalue())
        assert (own.import_prefix(both), own.import_prefix(both)) == (128, 192)
        assert own.generate(other, PLAIN).metrics.cached_tokens == 192


def _with_header(stream, **changes):
    """The stream with other values in its header, and sums that are right for it."""
    (length,) = struct.unpack_from("<I", stream, len(MAGIC))
    header = json.loads(stream[16 : 16 + length])
    for name, value in changes.items():
        (header["layout"] if name in header["layout"] else header)[name] = value
    encoded = json.dumps(header).encode()
    ids = stream[16 + length : 16 + length + 4 * 128]
    checksum = zlib.crc32(encoded)
    head = MAGIC + struct.pack("<II", len(encoded), checksum) + encoded
    return head + ids + struct.pack("<I", zlib.crc32(ids, checksum)) + stream[-100:]


def test_another_layout_is_refused_by_name(model, stream):
    own = with_engine(model)
    for name, value in {
        "byte order": "big",
        "dtype": "bfloat16",
        "page size": 32,
        "latent widths": [26, 26, 26, 27],
        "index key widths": [14, 14, 14, 14],
        "weights": "0" * 64,
    }.items():
        _refused(own, _with_header(stream, **{name: value}), f"^{name}: the stream ")
    _refused(own, _with_header(stream), "truncated stream: page 0")  # the others fail by that name
    half = with_engine(model, kv_cache_dtype="bfloat16")
    _refused(half, stream, "dtype: the stream has 'float32', this cache 'bfloat16'")


def test_a_hostile_header_allocates_nothing(model, stream, monkeypatch):
    own = with_engine(model)
    asked = []

    class Counting(io.BytesIO):
        def read(self, size):
            asked.append(size)
            return super().read(size)

    huge = MAGIC + struct.pack("<II", 2**32 - 1, 0)
    _refused(own, huge, "a header of 4294967295 bytes", Counting)
    for value in (10**12, -1, True, "2", None, 1.0):
        _refused(own, _with_header(stream, num_pages=value), "pages", Counting)
    _refused(own, _with_header(stream, mtp=1), "mtp=1", Counting)
    for content in (b"[]", b"{}", b'{"layout": 3}', b"\xff", b"[" * 60000, b"not json"):
        head = MAGIC + struct.pack("<II", len(content), zlib.crc32(content))
        _refused(own, head + content, "its header is not what", Counting)
    assert max(asked) <= 1 << 16
    without = tiny_model(overrides={"num_nextn_predict_layers": 0})
    _refused(without, _with_header(stream, mtp=True), "mtp: .* MTP layer", Counting)
    (length,) = struct.unpack_from("<I", stream, len(MAGIC))
    encoded = stream[16 : 16 + length]
    ids = struct.pack("<128I", *[*range(127), 131])
    sums = struct.pack("<I", zlib.crc32(ids, zlib.crc32(encoded)))
    _refused(own, stream[: 16 + length] + ids + sums, r"token id 131 is outside 0\.\.130")


def test_files_that_are_no_such_streams(model):
    own = with_engine(model)
    _refused(own, b"GGUF" + bytes(100), "not a stream of cache pages, or one of another version")
    _refused(own, b"glm53kv\x02" + bytes(100), "another version")
    for file in (io.StringIO("glm53kv"), 3, None):
        with pytest.raises(ValueError, match=r"file=.*: must be binary, with `read`"):
            own.import_prefix(file)


def test_files_that_take_no_bytes(model, prompt, tmp_path):
    own = with_engine(model)
    for file in (io.StringIO(), 3, None):
        with pytest.raises(ValueError, match=r"file=.*: must be binary, with `write`"):
            own.export_prefix(prompt, file)
    assert own.engine().stats.rows == 0, "refused before it is computed"
    with (
        tempfile.NamedTemporaryFile("w", dir=tmp_path) as file,
        pytest.raises(ValueError, match="must be binary"),
    ):
        own.export_prefix(prompt, file)

    class Full(Pipe):
        def write(self, piece):
            return None

    with pytest.raises(ValueError, match=r"the file took None of \d+ bytes: open it blocking"):
        own.export_prefix(prompt, Full())
    assert_idle(own.engine())


def test_without_prefix_caching_there_is_nothing_to_move(model, prompt, stream):
    own = with_engine(model, prefix_caching=False)
    for call in (
        lambda: own.export_prefix(prompt, io.BytesIO()),
        lambda: own.import_prefix(io.BytesIO(stream)),
    ):
        with pytest.raises(ValueError, match="prefix_caching=False"):
            call()
    with pytest.raises(ValueError, match="takes one prompt"):
        own.export_prefix([prompt, prompt], io.BytesIO())


def test_other_weights_are_noticed(stream):
    model = tiny_model()
    before = weight_fingerprint(model.network)
    assert before == weight_fingerprint(tiny_model().network)
    assert before != weight_fingerprint(tiny_model(1).network)
    own, layer = with_engine(model), model.network.model.layers[2]
    assert own.import_prefix(io.BytesIO(stream)) == 128
    with torch.no_grad():
        for tensor in (
            layer.input_layernorm.weight[17:18],
            layer.mlp.gate.e_score_correction_bias[3:4],
            layer.self_attn.q_b_proj.weight[0, :1],
            layer.mlp.experts.down_proj[-1, -1, -1:],
            layer.self_attn.o_proj.weight[5, 5:6],
            model.network.lm_head.weight[77, 3:4],
        ):
            tensor += 0.5
            assert weight_fingerprint(model.network) != before
            tensor -= 0.5
        model.network.model.norm.weight += 0.5
    with pytest.raises(ValueError, match="weights: the stream is of a model with fingerprint"):
        own.import_prefix(io.BytesIO(stream))
    assert len(own.engine().scheduler.prefix) == 0
    other = tiny_model(overrides={"rope_theta": 20_000.0})
    assert isinstance(other.config, GLM53Config) and weight_fingerprint(other.network) != before


def test_weights_written_through_data_are_noticed_once_it_is_said(stream):
    model = tiny_model()
    own = with_engine(model)
    assert own.import_prefix(io.BytesIO(stream)) == 128
    for parameter in model.parameters():
        parameter.data.mul_(1.05)
    own.engine().drop_prefixes()
    with pytest.raises(ValueError, match="weights: the stream is of a model with fingerprint"):
        own.import_prefix(io.BytesIO(stream))
    assert_idle(own.engine())


@pytest.mark.parametrize("known", [False, True])
def test_an_update_at_the_end_of_an_export(prompt, known):
    """Pages of the old weights do not go out under the new ones' fingerprint, nor any other."""
    model = tiny_model()
    own = with_engine(model)
    if known:
        own.export_prefix(prompts_of(70, seed=3)[0], io.BytesIO(), mtp=False)
    engine = own.engine()
    advance = engine.advance

    def advance_and_update():
        advance()
        with torch.no_grad():
            model.network.model.norm.weight += 0.5

    engine.advance = advance_and_update
    file = io.BytesIO()
    with pytest.raises(RuntimeError, match="the weights changed while the prefix was computed"):
        own.export_prefix(prompt, file, mtp=False)
    assert not file.getvalue()


def test_only_batch_invariant_pages_for_a_batch_invariant_engine(model, prompt, stream):
    invariant = with_engine(model, batch_invariant=True)
    _refused(invariant, stream, "batch_invariant: the stream is of an engine without it")
    file = io.BytesIO()
    with_engine(model, batch_invariant=True).export_prefix(prompt, file, mtp=False)
    content = file.getvalue()
    (length,) = struct.unpack_from("<I", content, len(MAGIC))
    conditions = json.loads(content[16 : 16 + length])["batch invariant"]
    for name in ("device", "number of threads", "version of torch"):
        other = _with_header(content, **{"batch invariant": conditions | {name: "another"}})
        _refused(invariant, other, f"bits depend on the {name}; the stream has 'another', this")
    for value in ({}, [], True):
        other = _with_header(content, **{"batch invariant": value})
        _refused(invariant, other, "batch_invariant: ")
    assert with_engine(model).import_prefix(io.BytesIO(content)) == 128
    assert invariant.import_prefix(io.BytesIO(content)) == 128
    longer, params = [*prompt, 9], SamplingParams.override(PLAIN, logprobs=2)
    cold = with_engine(model, batch_invariant=True, prefix_caching=False).generate(longer, params)
    warm = invariant.generate(longer, params)
    assert warm.metrics.cached_tokens == 128 and warm.logprobs == cold.logprobs


# Two processes, and the embedded model.

CHILD = """
import sys
from glm53 import GLM53
model = GLM53.from_pretrained(sys.argv[1], device="cpu", kv_cache_tokens=2048, progress=False)
prompt = [int(i) for i in sys.stdin.read().split()]
print(model.export_prefix(prompt, sys.stdout.buffer), file=sys.stderr)
"""


@pytest.fixture(scope="module")
def nano():
    return GLM53.from_pretrained(NANO, device="cpu", kv_cache_tokens=4096, progress=False)


def _code(nano, length):
    ids = nano.tokenizer.encode(Path(io.__file__).read_text(encoding="utf-8") * 2)
    return ids[:length]


def test_prefill_in_another_process(nano):
    prompt = _code(nano, 500)
    params = SamplingParams(temperature=0, max_new_tokens=24)
    local = with_engine(nano).generate(prompt, params)
    environment = os.environ | {"PYTHONPATH": str(Path(glm53.__file__).parents[1])}
    command = [sys.executable, "-c", CHILD, str(NANO)]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
    ) as child:
        timer = threading.Timer(240, child.kill)
        timer.start()
        child.stdin.write(" ".join(map(str, prompt)).encode())
        child.stdin.close()
        own = with_engine(nano)
        try:
            assert own.import_prefix(child.stdout) == 448
        finally:
            timer.cancel()
        assert child.stdout.read() == b"" and int(child.stderr.read().split()[-1]) == 448
    remote = own.generate(prompt, params)
    assert _ids(remote) == _ids(local) and remote.text == local.text
    metrics = remote.metrics
    assert metrics.cached_tokens == 448 and metrics.drafted > metrics.accepted > 0
    rows = own.engine().stats.rows
    assert rows == 500 - 448 + metrics.decode_steps - 1 + metrics.drafted
    assert_idle(own.engine())


def test_time_to_first_token_of_a_shared_prefix(nano):
    """1,000 shared tokens are 15 pages: 960 rows less. The figure is in docs/architecture.md."""
    shared, tails = _code(nano, 1000), prompts_of(*[12] * 6, seed=1)
    params = SamplingParams(temperature=0, max_new_tokens=2)
    ratios = []
    for first, second in zip(tails[::2], tails[1::2], strict=True):
        own = GLM53(nano.network, nano.tokenizer, kv_cache_tokens=4096)
        own.generate([5, 6, 7], params)  # makes the cache
        rows = [own.engine().stats.rows]
        cold = own.generate([*shared, *first], params).metrics
        rows.append(own.engine().stats.rows)
        warm = own.generate([*shared, *second], params).metrics
        rows.append(own.engine().stats.rows)
        assert (cold.cached_tokens, warm.cached_tokens) == (0, 960)
        assert [rows[1] - rows[0], rows[2] - rows[1]] == [1013, 1013 - 960]
        ratios.append(cold.ttft / warm.ttft)
    print(f"time to first token, cold over warm: {sorted(round(r, 1) for r in ratios)}")
    assert statistics.median(ratios) > 5
