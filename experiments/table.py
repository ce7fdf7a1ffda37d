"""Runs the paper's experiments at a small size, and writes the table of results.

Claim: the study can be repeated on any chip with one command.

    make experiments
    python -m experiments.table --directory experiments/results/small
    python -m experiments.table --no-run --directory experiments/results/nvidia-h200

Every experiment runs in a process of its own with `--smoke`, and writes its results to
the directory, which is emptied of earlier ones first. The table in
`experiments/README.md` is made of what is found there then; `--no-run` only makes the
table, of the results of full sizes say. Expect under 20 minutes on two CPU cores.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

ROOT = pathlib.Path(__file__).parents[1]
README = ROOT / "experiments" / "README.md"
START, END = "<!-- table -->", "<!-- end of the table -->"
"""What is between them in the README is replaced."""


class Experiment(NamedTuple):
    """A row of the table.

    Attributes:
      claim: What the paper says, or for `mixed` this project.
      figure: What was measured, in words, of the figures that the experiment saves.
    """

    claim: str
    figure: Callable[[Mapping[str, Any]], str]


def pairwise(figures: Mapping[str, Any]) -> str:
    """The improvement of like and unlike pairs."""
    kinds = {name: figures[name] for name in ("like", "unlike") if figures.get(name)}
    medians = [
        f"{name} pairs {_percent(each['median'])} in the median, at best "
        f"{_percent(each['best'])}"
        for name, each in kinds.items()
    ]
    return f"saved of {figures['pairs']} pairs: {'; '.join(medians)}"


def pack_size(figures: Mapping[str, Any]) -> str:
    """The best and the largest pack of each configuration."""
    rows = [
        f"{name}: {_percent(each['best'])} with {each['best_models']}, memory of "
        f"{each['largest_models']} x{each['memory_of_alone']:.2f} of one each"
        for name, each in figures["configurations"].items()
    ]
    return "saved at best: " + "; ".join(rows)


def shared_input(figures: Mapping[str, Any]) -> str:
    """What sharing the input saves, by the source of the batches."""
    rows = [
        f"{name}: "
        + ", ".join(f"{_percent(s['sharing'])} ({at})" for at, s in each.items())
        for name, each in figures["saved"].items()
    ]
    return f"saved by sharing, {figures['models']} models: " + "; ".join(rows)


def switching(figures: Mapping[str, Any]) -> str:
    """A swap, against a program and a process."""
    rows = [
        f"{name}: a swap takes {each['swap_ms']:.2g} ms, a new program "
        f"x{each['program']:,.0f}, a new process x{each['process']:,.0f}"
        for name, each in figures.items()
    ]
    return "; ".join(rows)


def policies(figures: Mapping[str, Any]) -> str:
    """The improvement of each policy, by form."""
    rows = [
        f"{way} {_percent(saved)}"
        for way, saved in figures["improvement"].items()
        if way != "own, none"
    ]
    return "saved of the time of an example against one by one: " + "; ".join(rows)


def hyperband(figures: Mapping[str, Any]) -> str:
    """The speed-up of each way, with its bound."""
    limits = figures["bounds"]["with_these_lanes"]
    rows = [
        f"{way.replace('_', ' ')} x{speed:.2f} (bound x{limits[way]:.2f})"
        for way, speed in figures["speed_up"].items()
        if way in limits
    ]
    same = "the same" if figures["same_promotions"] else "NOT the same"
    packed = figures["packed_against_solo"]
    return (
        f"{', '.join(rows)}; {same} scores and promotions; `packed` changes "
        f"{packed['changed_promotions']} of {packed['promotions']} promotions, rank "
        f"correlation {packed['rank_correlation']}"
    )


def mixed(figures: Mapping[str, Any]) -> str:
    """What the check of a mixed sweep found, and what fusing its families saves."""
    saved = ", ".join(
        f"{100 * found['improvement']:.0f} % with {workers} "
        f"({'' if found['fused'] else 'not '}chosen)"
        for workers, found in figures.get("fused_of_all", {}).items()
    )
    return (
        f"{figures['trials']} trials of {len(figures['models'])} families "
        f"({', '.join(figures['engines'])}); largest difference of a score from that "
        f"alone: {figures.get('largest_difference', 'not checked')}; saved by fusing "
        f"one of each: {saved or 'not measured'}"
    )


EXPERIMENTS = {
    "pairwise": Experiment(
        "a pack of two saves up to 40 % of their time on a GPU",
        pairwise,
    ),
    "pack_size": Experiment(
        "the more models in a pack, the more is saved, until the chip is full",
        pack_size,
    ),
    "shared_input": Experiment(
        "one input pipeline for all models of a pack saves what the others cost",
        shared_input,
    ),
    "switching": Experiment(
        "a model is loaded into a pack and out of it at little cost", switching
    ),
    "policies": Experiment(
        "packing trials that are alike beats packing at random", policies
    ),
    "hyperband": Experiment(
        "packed Hyperband takes a fraction of the time of the original", hyperband
    ),
    "mixed": Experiment(
        "(not in the paper) unlike models under one Hyperband score as they do alone",
        mixed,
    ),
}


@dataclasses.dataclass
class Flags:
    """The flags of this command."""

    directory: pathlib.Path = ROOT / "experiments" / "results" / "small"
    """Where the results are."""
    run: bool = True
    """Run the experiments first."""
    only: tuple[str, ...] = ()
    """Names of experiments to run; all by default."""


def run_all(directory: pathlib.Path, only: Sequence[str] = ()) -> dict[str, float]:
    """Runs the experiments one after the other.

    Args:
      directory: Where they write; the earlier results of each are removed.
      only: Their names; all if empty.

    Returns:
      The seconds that each took.

    Raises:
      ValueError: If there is no such experiment.
      RuntimeError: If one fails, after the others have run.
    """
    unknown = [name for name in only if name not in EXPERIMENTS]
    if unknown:
        raise ValueError(
            f"only has {', '.join(unknown)}; it may have {', '.join(EXPERIMENTS)}"
        )
    seconds, failed = {}, []
    for name in only or EXPERIMENTS:
        for suffix in ("json", "png"):
            (directory / f"{name}.{suffix}").unlink(missing_ok=True)
        command = [sys.executable, "-m", *command_of(name).split()[2:]]
        print(f"\n{command_of(name)}", flush=True)
        start = time.monotonic()
        done = subprocess.run([*command, "--directory", directory], cwd=ROOT)
        seconds[name] = time.monotonic() - start
        print(f"{seconds[name]:.0f} s", flush=True)
        if done.returncode or not (directory / f"{name}.json").exists():
            failed.append(name)
    if failed:
        raise RuntimeError(f"failed: {', '.join(failed)}")
    return seconds


def command_of(name: str) -> str:
    """The command of an experiment at a small size.

    Examples:
      >>> command_of("pairwise")
      'python -m experiments.pairwise --smoke'
    """
    return f"python -m experiments.{name} --smoke"


def rows(directory: pathlib.Path, smoke: bool = True) -> list[str]:
    """The table, in Markdown, of the results in a directory.

    Args:
      directory: Where the results are; what is not there has no row.
      smoke: Whether they are those of the small size.
    """
    lines = [
        "| claim of the paper | our figure | chip | command |",
        "|---|---|---|---|",
    ]
    for name, experiment in EXPERIMENTS.items():
        path = directory / f"{name}.json"
        if not path.exists():
            continue
        result = json.loads(path.read_text(encoding="utf-8"))
        command = (
            command_of(name) if smoke else command_of(name).removesuffix(" --smoke")
        )
        figure = experiment.figure(result["figures"])
        chip = result["environment"]["device"]
        lines.append(f"| {experiment.claim} | {figure} | {chip} | `{command}` |")
    return lines


def written(text: str, lines: Sequence[str]) -> str:
    r"""A README with the table replaced.

    Raises:
      ValueError: If the marks of the table are not there.

    Examples:
      >>> written(f"a\n{START}\nold\n{END}\nb", ["new"]).splitlines()
      ['a', '<!-- table -->', 'new', '<!-- end of the table -->', 'b']
    """
    before, start, rest = text.partition(START)
    _, end, after = rest.partition(END)
    if not start or not end:
        raise ValueError(f"the README has no table between {START} and {END}")
    return "\n".join([before + start, *lines, end + after])


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def main(args: Sequence[str] | None = None) -> None:
    """Runs all experiments and writes the table."""
    import tyro

    program = "python -m experiments.table"
    flags = tyro.cli(Flags, prog=program, args=args, description=__doc__)
    directory = flags.directory.absolute()
    try:
        seconds = run_all(directory, flags.only) if flags.run else {}
    except (ValueError, RuntimeError) as error:
        sys.exit(f"{program}: {error}")
    lines = rows(directory, smoke=flags.run)
    text = README.read_text(encoding="utf-8")
    README.write_text(written(text, lines), encoding="utf-8")
    print(f"\n{README}: {len(lines) - 2} rows")
    figures = {"rows": len(lines) - 2, "seconds": round(sum(seconds.values()), 1)}
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
