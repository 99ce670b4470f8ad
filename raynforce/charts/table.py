"""`raynforce export-metrics`: all metrics of a run as a table for spreadsheets and data frames."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from raynforce.charts.reading import Say, silent
from raynforce.errors import UsageError
from raynforce.runs.catalog import object_in, open_regular
from raynforce.runs.directory import RunDirectory, seeds_in
from raynforce.runs.mirrored import open_run
from raynforce.runs.store import is_url


def export_metrics(run: str | Path, out: str | Path | TextIO, *, say: Say = silent) -> dict[str, Any]:
    """Write the metrics of a run as CSV: a line for each report, a column for each metric, empty where it had none.

    A folder with the runs of several seeds gives one table, with a column `seed`. Returns the columns and how many
    rows there are.
    """
    say(f"reading {run}")
    runs = [] if is_url(str(run)) else [(path.name.removeprefix("seed"), RunDirectory(path)) for path in seeds_in(run)]
    several = bool(runs)
    runs = runs or [("", open_run(run if is_url(str(run)) else Path(run).expanduser()))]
    columns: dict[str, None] = {"step": None, "time": None}
    torn = rows = 0
    for _, each in runs:
        for line in _lines(each):
            columns |= dict.fromkeys(line)
            torn += not line
            rows += bool(line)
    if not rows:
        raise UsageError(f"{run} has no metrics yet: it has not reported")
    head = [*(["seed"] if several else []), *columns]

    say(f"writing {rows:,} rows")

    def write(file: TextIO) -> None:
        table = csv.DictWriter(file, head, restval="", lineterminator="\n")
        table.writeheader()
        for seed, each in runs:
            for line in filter(None, _lines(each)):
                known = {name: value for name, value in line.items() if name in columns}  # it may go on meanwhile
                table.writerow({**({"seed": seed} if several else {}), **known})

    if isinstance(out, io.TextIOBase) or hasattr(out, "write"):
        write(out)  # type: ignore[arg-type]
    else:
        _into(Path(str(out)).expanduser(), write)
    return {"rows": rows, "columns": head, "torn_lines": torn}


def _into(path: Path, write: Any) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", newline="", encoding="utf-8") as file:
            write(file)
        temporary.replace(path)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}") from None
    finally:
        if path.parent.is_dir():
            temporary.unlink(missing_ok=True)


def _lines(run: RunDirectory) -> Iterator[dict[str, Any]]:
    """The objects of its lines; an empty one for a line that is torn."""
    try:
        with open_regular(run.metrics) as file:
            for line in file:
                yield object_in(line, b'{"step":')
    except FileNotFoundError:
        return
    except OSError as error:
        raise UsageError(f"cannot read {run.metrics}: {error.strerror or error}") from None
