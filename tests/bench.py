"""`make bench`: the daemon beside bare onnxruntime and beside every other server that is found here (tests/peers).

Three pieces of work: a tiny model (the server's own cost), a recogniser (large tensors), a page of text as JPEG. Of
each: time from start to the first right answer, memory (PSS of all processes) before and after load, and closed loops
of some clients; of pages also how their text agrees with the labels. Rounds take turns between the servers, tables
show medians. Machines are noisy: trust ratios of one run. Answers are checked before any time is taken.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import distribution, version
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from peers import servers
from peers.servers import Server, Work
from support import tiny
from support.processes import clean_environment, end_marked, eventually, free_port, marked, new_mark
from typing_extensions import Self

from appliance.adapters.host import process_bytes
from appliance.bench import openloop, question
from appliance.runtime import choose
from appliance.runtime.machine import cpu_name
from models.folder import BundleFolder
from models.spec import Array
from models.tasks import text
from models.tasks.picture import decode_picture
from provisioning import accuracy, data

ROOT = Path(__file__).resolve().parent.parent
ALONE = "onnxruntime"
LOADS = {"tiny": (1, 4, 16), "recogniser": (1, 4, 16), "page": (1, 4)}
"""Clients, by piece of work."""
RECOGNISER = Path(str(distribution("rapidocr-onnxruntime").locate_file("rapidocr_onnxruntime/models"))) / (
    "ch_PP-OCRv4_rec_infer.onnx"
)
PAGE_SAYS = ("2024-0117", "348.50", "1,432.76")
MIB = 2**20

Row = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """A piece of work, and the same in process."""

    work: Work
    alone: Callable[[], Any]
    right: Callable[[Any], bool]


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--json", type=Path, metavar="FILE", default=ROOT / "build/bench.json", help="default build/bench.json")
    add("--work", default=",".join(LOADS), help="some of tiny,recogniser,page (default all)")
    add("--seconds", type=float, default=3.0, help="each load takes about so long (default 3)")
    add("--rounds", type=int, default=3, help="medians are over so many (default 3)")
    add("--bundle", type=Path, metavar="DIR", help="of ppocr-v6; default: built once, in build/ppocr-v6")
    add(
        "--data",
        type=Path,
        metavar="DIR",
        default=ROOT / "tests/data/ocr",
        help="labelled pages; default tests/data/ocr",
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        tasks = [task(what, options, Path(name)) for what in options.work.split(",")]
        rows = [
            {"round": number, "work": one.work.name, **row}
            for number in range(options.rounds)
            for one in tasks
            for row in measure(one, options, Path(name), last=number == options.rounds - 1)
        ]
    report = {
        "date": dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds"),
        "machine": f"{cpu_name()}, {os.cpu_count()} cores",
        "arguments": sys.argv[1:],
        "versions": {name: version(name) for name in ("onnxruntime", "numpy", "uvicorn")},
        "tables": tables(rows),
        "rows": rows,
    }
    show(report["tables"])
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(report, indent=1))
    print(f"\nwritten: {options.json}")
    if {row["server"] for row in rows} <= {ALONE, "ours", "fastapi"}:
        print("no other server was found: tests/peers/README.md says which are looked for, and where")


def task(name: str, options: argparse.Namespace, folder: Path) -> Task:
    """Make what is served, and open it in process with one thread."""
    runtime = choose("onnxruntime-cpu")
    if name == "page":
        bundle = options.bundle or built(ROOT / "build/ppocr-v6")
        opened = BundleFolder(bundle)
        graphs = opened.manifest.graphs.items()
        sessions = {
            key: runtime.open(opened.read(graph.variants["fp32"].graph), threads=1, few_shapes=False)
            for key, graph in graphs
        }
        settings, labels = opened.manifest.task.settings, opened.read_labels()
        jpeg = question.page()

        def read(jpeg: bytes = jpeg) -> list[str]:
            page = data.Page("", decode_picture(jpeg, MIB * 100), (), "")
            return accuracy.read_pages(sessions, [page], settings, labels, 1)[0]

        def says(lines: list[str]) -> bool:
            said = "".join(lines).replace(" ", "")
            return all(part in said for part in PAGE_SAYS)

        return Task(Work(name, bundle, picture=jpeg), read, says)
    if name == "tiny":
        model = tiny.linear_model(folder / "tiny.onnx")
        x = np.random.default_rng(1).normal(size=(1, 16)).astype(np.float32)
    else:
        model, x = RECOGNISER, a_line()
    session = runtime.open(model.read_bytes(), threads=1)
    inputs = {session.spec.inputs[0].name: x}
    (want,) = session.run(inputs).values()
    return Task(
        Work(name, model, inputs),
        lambda: session.run(inputs),
        lambda have: have.size == want.size and np.allclose(have, want.ravel(), rtol=1e-3, atol=1e-5),
    )


def a_line() -> Array:
    """Something of the size of a line, FP32 [1, 3, 48, 320]."""
    return np.random.default_rng(1).random((1, 3, 48, 320), dtype=np.float32)


def built(folder: Path) -> Path:
    """The reading bundle in float, as rapidocr_api runs it; made once."""
    if not (folder / "manifest.json").exists():
        build = [Path(sys.executable).with_name("provision"), "build", ROOT / "models/zoo/ppocr-v6.toml"]
        subprocess.run([*build, "--target", "cpu", "--precision", "fp32", "--out", folder], check=True)
    return folder


def measure(one: Task, options: argparse.Namespace, folder: Path, *, last: bool) -> Iterator[Row]:
    """One round of one piece of work: in process, then each server that can do it."""
    per_s = calls_per_s(one.alone, options.seconds)
    yield {"server": ALONE, "kind": "load", "clients": 1, "per_s": per_s, "ratio": 1.0}
    pages = data.load(options.data, "gate", project=ROOT / "tests/data/ocr").pages if last and one.work.picture else ()
    jpegs = {page.file: (options.data / "pages" / page.file).read_bytes() for page in pages}
    if pages:
        yield {"server": ALONE, "kind": "text", **score(pages, map(one.alone, jpegs.values()))}
    for describe in servers.ALL:
        state = Path(tempfile.mkdtemp(dir=folder))
        server = describe(one.work, state)
        if server is None:
            continue
        with Running(server, state / "log") as running:
            asked = server.question(one.work.picture)
            first_answer_s = running.first_answer_s(asked, one.right)
            yield {"server": server.name, "kind": "start", "version": server.version, "first_answer_s": first_answer_s}
            time.sleep(1)
            idle_mib = running.pss_mib()
            alone_s = 1 / calls_per_s(partial(running.ask, asked), 0.5)
            for clients in LOADS[one.work.name]:
                fit = options.seconds * min(clients, int(servers.WORKERS)) / alone_s
                row = running.load(asked, clients, max(int(fit), 4 * clients))
                yield {"server": server.name, "kind": "load", **row, "ratio": row["per_s"] / per_s}
            yield {"server": server.name, "kind": "memory", "idle_mib": idle_mib, "loaded_mib": running.pss_mib()}
            if pages:
                read = (running.ask(server.question(jpeg)) for jpeg in jpegs.values())
                yield {"server": server.name, "kind": "text", **score(pages, read)}


class Running:
    """A server from its start to the last process of it."""

    def __init__(self, server: Server, log: Path) -> None:
        """Start it."""
        self._server, self._port, self._mark, self._log = server, free_port(), new_mark(), log
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{self._port}", timeout=60, trust_env=False)
        env = {**clean_environment(self._mark), "OMP_NUM_THREADS": "1", **server.env}
        with log.open("wb") as out:
            self._began = time.perf_counter()
            self._process = subprocess.Popen(
                server.command(self._port), env=env, cwd=log.parent, stdin=subprocess.DEVNULL, stdout=out, stderr=out
            )

    def __enter__(self) -> Self:
        """It need not be ready yet."""
        return self

    def __exit__(self, *_: object) -> None:
        """Leave nothing of it."""
        self._http.close()
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(15)
        end_marked(self._mark)
        self._process.wait()

    def ask(self, asked: question.Question) -> Any:  # noqa: ANN401 - an array or lines
        """The answer to one request; raises httpx.HTTPError."""
        sent = self._http.post(asked.path, content=asked.content, headers=dict(asked.headers))
        return self._server.read(sent.raise_for_status())

    def first_answer_s(self, asked: question.Question, right: Callable[[Any], bool]) -> float:
        """Seconds from the start to the first answer that is right; an answer that is not ends the benchmark."""

        def answered() -> bool:
            assert self._process.poll() is None, f"{self._server.name} has ended: {self._log.read_text()[-2000:]}"
            with contextlib.suppress(httpx.HTTPError):
                answer = self.ask(asked)
                assert right(answer), f"{self._server.name} gave a wrong answer: {answer!r:.500}"
                return True
            return False

        eventually(answered, f"{self._server.name} answers", 120)
        return time.perf_counter() - self._began

    def load(self, asked: question.Question, clients: int, count: int) -> Row:
        """A closed loop of so many clients and requests."""
        before_s = self._cpu_s()
        wire = asked.wire(f"127.0.0.1:{self._port}", {})
        answers = openloop.run(("127.0.0.1", self._port), wire, np.zeros(count), at_once=clients)
        ok = answers.status == httpx.codes.OK
        took_ms = (answers.latency_s - answers.late_s)[ok] * 1e3
        return {
            "clients": clients,
            "requests": count,
            "errors": int((~ok).sum()),
            "per_s": float(ok.sum() / answers.latency_s[ok].max()),
            "p50_ms": float(np.median(took_ms)),
            "p99_ms": float(np.quantile(took_ms, 0.99)),
            "cpu_ms": (self._cpu_s() - before_s) / count * 1e3,
        }

    def pss_mib(self) -> float:
        """Of all its processes."""
        return sum(process_bytes(pid) or 0 for pid in marked(self._mark)) / MIB

    def _cpu_s(self) -> float:
        """User and system time of all its processes."""
        ticks = 0
        for pid in marked(self._mark):
            with contextlib.suppress(OSError):
                ticks += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))
        return ticks / os.sysconf("SC_CLK_TCK")


def calls_per_s(call: Callable[[], object], seconds: float) -> float:
    """Calls a second, by their median, one after the other for so long."""
    call()
    times, until = [], time.perf_counter() + seconds
    while not times or time.perf_counter() < until:
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return 1 / statistics.median(times)


def score(pages: Iterable[data.Page], read: Iterable[list[str]]) -> Row:
    """Labelled texts beside the line read there that is nearest: share that is equal, character errors, share found."""
    pages, lines = list(pages), list(read)
    pairs = []
    for page, there in zip(pages, lines, strict=True):
        normal = [text.normalise(line, page.source) for line in there]
        for label in (text.normalise(label, page.source) for label in page.texts):
            nearest = min(normal, key=lambda line: text.edit_distance(label, line), default="")
            pairs.append((label, nearest))
    exact, cer = text.exact_and_cer(pairs)
    found = 1 - accuracy.overlooked(pages, lines).share
    return {"pages": len(pages), "texts": len(pairs), "exact": exact, "cer": cer, "found": found}


def tables(rows: list[Row]) -> dict[str, list[Row]]:
    """Rows of each kind, with medians over the rounds."""
    groups: defaultdict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row["kind"], row["work"], row["server"], row.get("clients", 0)].append(row)
    found: defaultdict[str, list[Row]] = defaultdict(list)
    for (kind, work, server, _), several in groups.items():
        figures = {key for key, value in several[0].items() if key != "round" and not isinstance(value, str)}
        medians = {key: statistics.median(row[key] for row in several) for key in several[0] if key in figures}
        found[kind].append({"work": work, "server": server, **medians})
    return dict(found)


def show(found: Mapping[str, list[Row]]) -> None:
    """Print each table in Markdown."""
    for kind, several in found.items():
        columns = list(max(several, key=len))
        print(f"\n{kind}\n\n| {' | '.join(columns)} |\n|---|---|{'---:|' * (len(columns) - 2)}")
        for row in several:
            cells = (f"{row[key]:.4g}" if isinstance(row.get(key), float) else str(row.get(key, "")) for key in columns)
            print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
