"""The commands; Typer reads their arguments."""

# Choices of the command line are computed.
# pyright: reportInvalidTypeForm=false, reportIndexIssue=false

from __future__ import annotations

import enum
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import torch
import typer

import liger_chunked as library
from liger_chunked.cli import bench as benchmark
from liger_chunked.cli import check as self_test
from liger_chunked.cli import memory as sizes
from liger_chunked.cli import score as scores
from liger_chunked.cli import step as whole_step
from liger_chunked.cli.losses import LOSSES, PAIRS, TAUGHT
from liger_chunked.kernels.backend import TRITON_ERROR, WIDE_TILES, triton, use_triton

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
INTEGRATIONS = ("transformers", "trl", "peft", "accelerate")

Loss = enum.Enum("Loss", {name: name for name in LOSSES}, type=str)  # type: ignore[misc]
Dtype = enum.Enum("Dtype", {name: name for name in DTYPES}, type=str)  # type: ignore[misc]

app = typer.Typer(
    name="liger-chunked",
    help="What runs here, how much memory a loss takes, how fast and exact it is, and scores of a model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def run(arguments: Sequence[str]) -> int:
    try:
        status = app(list(arguments), standalone_mode=False)
    except typer.Abort:
        return 130
    except Exception as error:
        if isinstance(error, (ValueError, TypeError)):
            print(f"liger-chunked: error: {error}", file=sys.stderr)
        elif (format_message := getattr(error, "format_message", None)) is not None:
            if message := format_message():  # none with the help
                print(f"liger-chunked: error: {message}", file=sys.stderr)
        else:
            raise
        return 2
    return status if isinstance(status, int) else 0


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _device() -> tuple[torch.device, str]:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu"), "cpu"
    if accelerator.type != "cuda":
        return accelerator, str(accelerator)
    properties = torch.cuda.get_device_properties(accelerator)
    return accelerator, f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"


def facts() -> dict[str, str]:
    """Return what `env` prints."""
    device, name = _device()
    return {
        "liger_chunked": library.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        # Not the version of a package, which has other names for ROCm and Intel.
        "triton": triton.__version__ if TRITON_ERROR is None else TRITON_ERROR,
        "device": name,
        "kernels": "Triton" if use_triton(torch.empty(0, device=device)) else "torch",
        "fused_epilogue": _on_gpus(WIDE_TILES),
        **{package: _version(package) for package in INTEGRATIONS},
    }


def _on_gpus(majors: Sequence[int]) -> str:
    """
    >>> _on_gpus((9,)), _on_gpus(())
    ('on GPUs of compute capability 9.x', 'off')
    """
    return f"on GPUs of compute capability {', '.join(f'{major}.x' for major in majors)}" if majors else "off"


def _show_version(wanted: bool) -> None:
    if wanted:
        print(library.__version__)
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True, help="and exit")] = False,
) -> None: ...


@app.command()
def env() -> None:
    """Versions, device, kernels, frameworks."""
    for name, value in facts().items():
        print(f"{name:14s} {value}")


@app.command()
def memory(
    loss: Annotated[Loss, typer.Argument(show_default=False)],
    shape: Annotated[
        str,
        typer.Option(help="of the target: sequences x length, as 8x2048, pairs as 4x2x2048, or tokens", metavar="BxT"),
    ],
    model: Annotated[str | None, typer.Option(help="a config.json, its folder, or a class of transformers")] = None,
    vocab_size: Annotated[int | None, typer.Option(help="default: the model's")] = None,
    hidden_size: Annotated[int | None, typer.Option(help="default: the model's")] = None,
    valid: Annotated[str | None, typer.Option(help="tokens with a target: in total, or per sequence: 512,700")] = None,
    dtype: Annotated[Dtype, typer.Option(help="of weight and hidden states")] = Dtype["bfloat16"],
    autocast: Annotated[Dtype | None, typer.Option(help="the dtype of torch.autocast")] = None,
    frozen_head: Annotated[bool, typer.Option("--frozen-head", help="as under PEFT")] = False,
    frozen_input: Annotated[bool, typer.Option("--frozen-input", help="hidden states need no gradient")] = False,
    logits_budget: Annotated[str | None, typer.Option(help="bytes, or with a unit: 256MiB; default: automatic")] = None,
    free: Annotated[str | None, typer.Option(help="memory for the loss, as 20GiB: also print what fits")] = None,
) -> None:
    """Peak memory of a loss, forward and backward above its inputs."""
    parsed = sizes.parse_shape(shape, of_pairs=loss.value in PAIRS)
    most = None if free is None else sizes.parse_bytes("--free", free)
    if warning := sizes.source_of_sizes(model if vocab_size is None or hidden_size is None else None):
        print(f"liger-chunked: {warning}", file=sys.stderr)
    case = sizes.Case(
        loss=loss.value,
        shape=parsed,
        settings={
            **sizes.model_sizes(model, vocab_size, hidden_size),
            "valid": None if valid is None else sizes.parse_valid(valid),
            "dtype": DTYPES[dtype.value],
            "autocast": None if autocast is None else DTYPES[autocast.value],
            "trainable_head": not frozen_head,
            "trainable_input": not frozen_input,
            "logits_budget": logits_budget,
        },
    )
    sizes.show(case, most)


@app.command()
def step(
    loss: Annotated[Loss, typer.Argument(show_default=False)],
    shape: Annotated[str, typer.Option(help="sequences x length, as 8x2048, or pairs, as 4x2x2048", metavar="BxT")],
    model: Annotated[str, typer.Option(help="a config.json, its folder, or a class of transformers")],
    gpu: Annotated[str, typer.Option(help="the memory of the GPU: 79GiB for a card of 80 GB")],
    dtype: Annotated[Dtype, typer.Option(help="of the weights; float32 is TRL's default")] = Dtype["float32"],
    lora_rank: Annotated[int, typer.Option(help="train LoRA on all linear layers; 0: train all weights", min=0)] = 0,
    ref_logps: Annotated[bool, typer.Option("--ref-logps", help="computed before: no reference in memory")] = False,
) -> None:
    """Memory of a whole training step on one GPU, by a formula that says what it assumes, and whether it fits.

    The exit status is 1 if it does not.
    """
    if loss.value in TAUGHT or loss.value == "token-stats":
        raise ValueError(f"the formula counts no teacher: expected a loss without one, got {loss.value}")
    if warning := sizes.source_of_sizes(model):
        print(f"liger-chunked: {warning}", file=sys.stderr)
    parsed = sizes.parse_shape(shape, of_pairs=loss.value in PAIRS)
    of_model, of_gpu = whole_step.Sizes.of(sizes.config_of(model)), sizes.parse_bytes("--gpu", gpu)
    found = whole_step.Step(loss.value, of_model, parsed, DTYPES[dtype.value], lora_rank, ref_logps)
    if not whole_step.show(found, of_gpu):
        raise typer.Exit(1)


@app.command()
def bench(
    losses: Annotated[
        list[Loss] | None, typer.Argument(help="default: cross-entropy, dpo, grpo, jsd", show_default=False)
    ] = None,
    shape: Annotated[str | None, typer.Option(help="sequences x length; default: by the device", metavar="BxT")] = None,
    model: Annotated[str | None, typer.Option(help="a config.json, its folder, or a class of transformers")] = None,
    vocab_size: Annotated[int | None, typer.Option(help="default: by the device")] = None,
    hidden_size: Annotated[int | None, typer.Option(help="default: by the device")] = None,
    logits_budget: Annotated[str | None, typer.Option(help="bytes, or with a unit: 256MiB; default: automatic")] = None,
    figure: Annotated[Path | None, typer.Option(help="draw this file, .svg, .png or .pdf; needs matplotlib")] = None,
) -> None:
    """Time and memory of losses on this machine, fused and eager."""
    names = [loss.value for loss in losses or []] or ["cross-entropy", "dpo", "grpo", "jsd"]
    default = benchmark.default_sizes()
    chosen = sizes.model_sizes(
        model,
        vocab_size or (None if model else default["vocab_size"]),
        hidden_size or (None if model else default["hidden_size"]),
    )
    batch = sizes.parse_shape(shape, of_pairs=set(names) <= set(PAIRS)) if shape else default["shape"]
    if len(batch) != 2:
        raise ValueError(f"--shape must have sequences and a length, as 8x2048, got {shape!r}")
    if "token-stats" in names:
        raise ValueError("token-stats is no loss: measure grpo, which reads the same statistics")
    if figure is not None:
        benchmark.check_figure(figure)
    if warning := sizes.source_of_sizes(model if vocab_size is None or hidden_size is None else None):
        print(f"liger-chunked: {warning}", file=sys.stderr)
    case = benchmark.Case(names, batch, **chosen, logits_budget=logits_budget)
    benchmark.show(case, benchmark.measure(case), figure)


@app.command()
def check(
    seed: Annotated[int, typer.Option(help="of the random batches")] = 0,
) -> int:
    """Compare every loss and base kernel on this machine's device with float64."""
    return self_test.show(seed)


@app.command()
def score(
    model: Annotated[str, typer.Argument(help="a name, a folder or a .gguf file", show_default=False)],
    data: Annotated[
        str, typer.Argument(help="a .jsonl, .parquet, .csv or .txt file, a folder, or a name", show_default=False)
    ],
    column: Annotated[str, typer.Option(help="of texts, or of lists of messages")] = "text",
    split: Annotated[str, typer.Option(help="of a data set with several")] = "train",
    max_length: Annotated[int, typer.Option(help="of a window, to which documents are cut", min=2)] = 1024,
    batch_size: Annotated[int, typer.Option(help="windows at once", min=1)] = 8,
    limit: Annotated[int | None, typer.Option(help="so many documents; default: all", min=1)] = None,
    dtype: Annotated[Dtype | None, typer.Option(help="default: bfloat16, on a CPU float32")] = None,
    logits_budget: Annotated[str | None, typer.Option(help="bytes, or with a unit: 256MiB; default: automatic")] = None,
) -> None:
    """Perplexity and accuracy of a model on a data set, from chunks of logits."""
    documents = scores.load_data(data, split)
    documents = documents if limit is None else documents.select(range(min(limit, len(documents))))
    device, _ = _device()
    default = torch.float32 if device.type == "cpu" else torch.bfloat16
    loaded, tokenizer = scores.load_model(model, device, default if dtype is None else DTYPES[dtype.value])
    found = scores.windows(documents, column, tokenizer, max_length)
    scores.show(loaded, found, batch_size, f"{Path(model).name} on {Path(data).name}", logits_budget)
