"""The configuration file: what it may say, and what every mistake in it is answered with."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import ValidationError

from sglang_dflash import config
from sglang_dflash.config import ConfigError, Settings, TreeShape

CONFIGS = Path(__file__).parents[2] / "configs"


def write(folder: Path, text: str) -> Path:
    file = folder / "dflash.yaml"
    file.write_text(text)
    return file


def test_a_file_sets_what_it_names_and_leaves_the_rest_at_its_default(tmp_path: Path) -> None:
    settings = config.load(write(tmp_path, "block_size: 8\nlog_every: 0\n"))
    assert settings == Settings(block_size=8, log_every=0)
    assert settings.worker == "dflash"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ["empty", "block_size, tree_rows, candidates"]),
        ("# nothing here\n", ["empty"]),
        ("a: [", ["not valid YAML", "line 1"]),
        ("block_size: 2024-13-45", ["not valid YAML"]),
        ("- block_size\n- 8", ["found a list", "Known keys"]),
        ("block_size", ["found a str", "'block_size'"]),
        ("block_size: 8\nblock_size: 9", ["'block_size' appears twice", "line 2"]),
        ("blok_size: 8", ["unknown key 'blok_size'", "Did you mean 'block_size'?"]),
        ("Log-Every: 8", ["unknown key 'Log-Every'", "Did you mean 'log_every'?"]),
        ("1: 8", ["unknown key 1", "Known keys"]),
        ("block_size: 1", ["block_size=1 ", "greater than or equal to 2", "the drafter's own"]),
        ("block_size: true", ["block_size=True", "valid integer"]),
        ("block_size: 8.0", ["block_size=8.0", "valid integer"]),
        ("block_size: '8'", ["block_size='8'", "valid integer"]),
        ("log_every: -1", ["log_every=-1", "the default, 500"]),
        ("log_every:", ["log_every=None", "valid integer"]),
        ("tree_rows: 1", ["tree_rows=1 ", "greater than or equal to 2", "the block's chain"]),
        ("tree_rows: 129", ["tree_rows=129 ", "less than or equal to 128"]),
        ("candidates: 17", ["candidates=17 ", "less than or equal to 16", "the default, 8"]),
        ("candidates: 0", ["candidates=0 ", "greater than or equal to 1"]),
        ("keep_spine: 1", ["keep_spine=1 ", "valid boolean"]),
        ("spine_discount: -0.1", ["spine_discount=-0.1 ", "greater than or equal to 0"]),
        ("spine_discount: .inf", ["spine_discount=inf ", "finite"]),
        ("tree_row: 16", ["unknown key 'tree_row'", "Did you mean 'tree_rows'?"]),
        ("worker: builtn", ["worker='builtn'", "'dflash' or 'builtin'"]),
        ("worker: yes", ["worker=True", "'dflash' or 'builtin'"]),
        ("worker: !!python/name:os.system ''", ["not valid YAML"]),
    ],
)
def test_a_mistake_is_one_message_with_file_key_value_and_remedy(
    tmp_path: Path, text: str, parts: list[str]
) -> None:
    file = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        config.load(file)
    message = str(caught.value)
    assert message.startswith(f"--speculative-dflash-config={file}: ")
    assert "\n" not in message
    for part in parts:
        assert part in message


@pytest.mark.parametrize("content", [None, b"\xff\xfe\x00"], ids=["missing", "binary"])
def test_an_unreadable_file_is_refused(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "dflash.yaml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=re.escape(f"{file}: cannot read the file")):
        config.load(file)


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the file"):
        config.load(tmp_path)


def test_the_flag_wins_over_the_variable(tmp_path: Path) -> None:
    by_flag, by_variable = tmp_path / "flag.yaml", tmp_path / "variable.yaml"
    by_flag.write_text("block_size: 4")
    by_variable.write_text("log_every: 3\nworker: builtin")
    environment = {config.ENVIRONMENT: str(by_variable)}

    loaded = config.find(str(by_flag), environment)
    assert loaded.settings == Settings(block_size=4)
    assert loaded.origins == {
        **dict.fromkeys(Settings.model_fields, "default"),
        "block_size": f"--speculative-dflash-config={by_flag}",
    }

    loaded = config.find(None, environment)
    assert loaded.settings == Settings(log_every=3, worker="builtin")
    assert loaded.origins["worker"] == f"SGLANG_DFLASH_CONFIG={by_variable}"

    assert config.find(None, {}).settings == Settings()
    assert set(config.find(None, {}).origins.values()) == {"default"}


def test_a_mistake_in_the_variables_file_names_the_variable(tmp_path: Path) -> None:
    file = write(tmp_path, "wrker: builtin")
    with pytest.raises(ConfigError, match=re.escape(f"SGLANG_DFLASH_CONFIG={file}: unknown key")):
        config.find(None, {config.ENVIRONMENT: str(file)})


def test_an_empty_path_is_a_mistake_and_not_the_default() -> None:
    with pytest.raises(ConfigError, match="cannot read the file"):
        config.find("", {})


def test_settings_cannot_change_after_launch() -> None:
    with pytest.raises(ValidationError):
        Settings().block_size = 4  # type: ignore[misc]


def test_every_shipped_configuration_loads() -> None:
    files = [file for file in sorted(CONFIGS.glob("*.yaml")) if "train" not in file.name]
    assert {file.name for file in files} >= {
        "demo.yaml",
        "llama-3.1-8b.yaml",
        "qwen3-8b.yaml",
        "qwen3-coder-30b-a3b.yaml",
    }
    for file in files:
        assert config.load(file).model_fields_set, file.name
        if file.name != "demo.yaml":
            assert "not measured here" in file.read_text(), file.name


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("log_every: 0", None),
        ("candidates: 4", None),
        ("tree_rows: 8", None),
        ("tree_rows: 8\nkeep_spine: false", TreeShape(8, keep_spine=False)),
        ("tree_rows: 32\nspine_discount: 1", TreeShape(32, spine_discount=1.0)),
        ("tree_rows: 16\ncandidates: 4", TreeShape(16, candidates=4)),
    ],
)
def test_a_tree_is_grown_where_a_chain_would_not_do(
    tmp_path: Path, text: str, shape: TreeShape | None
) -> None:
    settings = config.load(write(tmp_path, text)).model_copy(update={"block_size": 8})
    assert settings.tree_shape == shape
