"""The ``sglang-dflash`` command."""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from sglang_dflash.platforms import limit_spinning

limit_spinning()  # before the commands import torch
console = Console(stderr=True)
app = typer.Typer(no_args_is_help=True, add_completion=False, help="Block-diffusion drafting.")
train = typer.Typer(no_args_is_help=True, help="Train a drafter for a target of your own.")
app.add_typer(train, name="train")

ConfigArgument = Annotated[str, typer.Argument(help="The training file (YAML).")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", help="section.key=value; wins over the file. Repeat for more."),
]


@app.callback()
def root() -> None:
    """Block-diffusion drafting for stock SGLang."""


@train.command()
def run(config: ConfigArgument, set_: SetOption = None) -> None:
    """All stages in order: generate, fit, score, export."""
    with _errors():
        stages, opened = _open(config, set_)
        _generate(stages, opened)
        if _fit(stages, opened):
            _score(stages, opened, None)
            _export(stages, opened)


@train.command()
def generate(config: ConfigArgument, set_: SetOption = None) -> None:
    """Let the target answer the prompts; goes on where it stopped."""
    with _errors():
        _generate(*_open(config, set_))


@train.command()
def fit(config: ConfigArgument, set_: SetOption = None) -> None:
    """Fit the drafter; goes on where it stopped. Under torchrun on several GPUs."""
    with _errors():
        _fit(*_open(config, set_))


@train.command()
def score(
    config: ConfigArgument,
    data: Annotated[
        list[str] | None, typer.Option(help="JSONL with answers; held-out ones by default.")
    ] = None,
    set_: SetOption = None,
) -> None:
    """Accept length on answers the target gave at temperature 0."""
    with _errors():
        stages, opened = _open(config, set_)
        _score(stages, opened, data)


@train.command()
def export(config: ConfigArgument, set_: SetOption = None) -> None:
    """Write the drafter as a checkpoint SGLang serves."""
    with _errors():
        _export(*_open(config, set_))


# ---- what the commands share ---------------------------------------------------------------


@contextmanager
def _errors() -> Any:
    """One line instead of a traceback for what the user can mend."""
    from sglang_dflash.train.errors import TrainError
    from sglang_dflash.yaml_file import ConfigError

    try:
        yield
    except (ConfigError, TrainError) as error:
        console.print(f"[bold red]Error:[/] {error}", highlight=False, soft_wrap=True)
        raise typer.Exit(2) from error


def _open(path: str, overrides: list[str] | None) -> tuple[Any, Any]:
    from sglang_dflash.train import config as training_file

    settings = training_file.load(path, overrides or ())
    console.print("Loading torch and transformers", style="dim")
    from sglang_dflash.train import stages

    _join_workers()
    return stages, stages.Run(settings)


def _join_workers() -> None:
    """Join the processes torchrun started, where it did."""
    import os

    import torch
    from torch import distributed

    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not distributed.is_initialized():
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")


def _progress(title: str) -> Any:
    columns = (
        TextColumn(title),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    return Progress(*columns, console=console)


def _generate(stages: Any, opened: Any) -> None:
    with _progress("generate") as bar:
        task = bar.add_task("", total=None, note="starting the server")
        file = stages.generate(opened, _advance(bar, task))
    console.print(f"Answers: {file}")


def _fit(stages: Any, opened: Any) -> bool:
    """Fit; returns False if it was interrupted."""
    interrupted = False

    def interrupt(*_: Any) -> None:
        nonlocal interrupted
        interrupted = True

    previous = signal.signal(signal.SIGINT, interrupt)
    try:
        with _progress("fit") as bar:
            task = bar.add_task("", total=None, note="")

            def report(made: Any) -> None:
                note = f"loss {made.loss:.3f}  accept length {made.accept_length:.3f}"
                bar.update(task, completed=made.step, total=made.steps, note=note)
                if not console.is_terminal:
                    console.print(f"step {made.step}/{made.steps}  {note}", highlight=False)

            trainer = stages.fit(opened, report, lambda: interrupted)
    finally:
        signal.signal(signal.SIGINT, previous)
    spent = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in trainer.seconds.items())
    console.print(f"Fitted {trainer.step} of {trainer.steps} steps: {spent}")
    if interrupted:
        console.print("Interrupted; run the stage again to go on.")
    return not interrupted


def _score(stages: Any, opened: Any, data: list[str] | None) -> None:
    with _progress("score") as bar:
        task = bar.add_task("", total=None, note="")
        scores = stages.score_held_out(opened, data, _advance(bar, task))
    table = Table("source", "accept length", "tokens", "accepted by position")
    for source, one in sorted(scores.items(), key=lambda item: (item[0] == "all", item[0])):
        positions = " ".join(f"{share:.2f}" for share in one.by_position)
        table.add_row(source, f"{one.accept_length:.3f}", str(one.tokens), positions)
    console.print(table)


def _export(stages: Any, opened: Any) -> None:
    console.print(f"Drafter: {stages.export(opened)}")


def _advance(bar: Any, task: Any) -> Callable[[int, int], None]:
    return lambda done, total: bar.update(task, completed=done, total=total, note="")


if __name__ == "__main__":
    app()
