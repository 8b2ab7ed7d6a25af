"""The command and its file: a mistake is one line that says how to mend it."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from sglang_dflash.cli import app
from sglang_dflash.train import config as training_file
from sglang_dflash.yaml_file import ConfigError

GOOD = {
    "target": "a/b",
    "output": "runs/x",
    "data": {"files": ["a.jsonl"]},
    "drafter": {"mask_token_id": 5},
}
CONFIGS = Path(__file__).parents[2] / "configs"


def written(tmp_path: Path, content: object) -> Path:
    file = tmp_path / "train.yaml"
    file.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return file


def test_a_file_sets_what_it_names_and_an_override_wins(tmp_path: Path) -> None:
    file = written(tmp_path, {**GOOD, "fit": {"steps": 7}})
    assert training_file.load(file).fit.steps == 7
    changed = training_file.load(file, ["fit.steps=9", "objective.weighting=exponential"])
    assert changed.fit.steps == 9
    assert changed.objective.weighting == "exponential"
    assert changed.drafter.mask_token_id == 5


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({**GOOD, "fitt": {}}, "unknown key 'fitt'. Did you mean 'fit'?"),
        ({**GOOD, "fit": {"step": 1}}, "unknown key 'fit.step'. Did you mean 'fit.steps'?"),
        ({**GOOD, "fit": 3}, "fit is a section of keys ("),
        ({**GOOD, "fit": {"steps": 0}}, "fit.steps=0 is not usable"),
        ({**GOOD, "fit": {"clip": "much"}}, "fit.clip='much' is not usable"),
        ({**GOOD, "data": {}}, "data.files is missing"),
        ({k: v for k, v in GOOD.items() if k != "target"}, "target is missing"),
        ("", "the file is empty"),
    ],
)
def test_a_mistake_names_file_and_key(tmp_path: Path, content: object, message: str) -> None:
    file = written(tmp_path, content)
    with pytest.raises(ConfigError) as caught:
        training_file.load(file)
    assert str(caught.value).startswith(f"{file}: ")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [("fit.steps", "no '='"), ("target.x=1", "'target' is not a section"), ("fit.q=1", "fit.q")],
)
def test_a_wrong_override_is_named(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        training_file.load(written(tmp_path, GOOD), [override])


def test_the_command_fails_with_one_line(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["train", "fit", str(written(tmp_path, {**GOOD, "fot": 1}))])
    assert result.exit_code == 2
    assert "Traceback" not in result.output
    assert result.output.count("Error:") == 1
    assert "unknown key 'fot'" in result.output


def test_every_shipped_training_file_loads() -> None:
    files = sorted(CONFIGS.glob("train*.yaml"))
    assert files
    for file in files:
        assert training_file.load(file).drafter.mask_token_id is not None
