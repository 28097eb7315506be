"""Documents say what is so: their shell blocks run, their links lead somewhere, and what they quote is in the code.

A block that begins with ```sh run is run, in the order of its document, each by a bash of its own in one folder. More
words may follow: `serves` (its last row is a daemon: it is waited for, and ends with the document) and `long`.
Port 8080 becomes a free one. What a reader is told to have is laid out by PREPARED.
"""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import cv2
import httpx
import numpy as np
import pytest
from support import own, tiny
from support.processes import clean_environment, end_marked, eventually, free_port, new_mark

pytestmark = pytest.mark.journey

ROOT = Path(__file__).parent.parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"^```sh run(?P<words>[^\n]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
WITHIN_S = 400


@dataclass(frozen=True)
class Block:
    """One block that is run."""

    text: str
    words: tuple[str, ...]


def blocks(document: Path) -> list[Block]:
    """What is run of a document."""
    found = BLOCK.finditer(document.read_text(encoding="utf-8"))
    return [Block(one["text"], tuple(one["words"].split())) for one in found]


class Reader:
    """Somebody who does what a document says, in an empty folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port, self._mark = folder, free_port(), new_mark()
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._url = f"http://127.0.0.1:{self.port}"
        (folder / ".curlrc").write_text("fail-with-body\nsilent\nshow-error\nnoproxy = *\n")
        self._env = clean_environment(self._mark) | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "APPLIANCE_URL": self._url,
            "APPLIANCE_HTTP__PORT": str(self.port),
            "APPLIANCE_STATE_DIR": str(folder / ".state"),
            "CURL_HOME": str(folder),
        }

    def run(self, block: Block) -> None:
        """Do what a block says; fails with all that was printed."""
        *rows, last = block.text.splitlines() if "serves" in block.words else [*block.text.splitlines(), ""]
        ended = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", "\n".join(rows).replace("8080", str(self.port))],
            cwd=self.folder,
            env=self._env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=WITHIN_S,
            check=False,
        )
        assert ended.returncode == 0, f"{block.text}\n{ended.stdout}\n{ended.stderr}"
        if last:
            self.serve(last)

    def serve(self, command: str) -> None:
        """Start a daemon, and wait until it is ready."""
        log = self.folder / "log.jsonl"
        with log.open("wb") as file:
            started = subprocess.Popen(
                ["bash", "-c", f"exec {command}"],
                cwd=self.folder,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
            )

        self._daemons.append(started)

        def ready() -> bool:
            assert started.poll() is None, log.read_text()
            try:
                return httpx.get(f"{self._url}/v2/health/ready", trust_env=False).is_success
            except httpx.HTTPError:
                return False

        eventually(ready, f"`{command}` is ready: {log.read_text()}", 60.0)

    def close(self) -> None:
        """Leave nothing behind."""
        end_marked(self._mark)
        for daemon in self._daemons:
            daemon.wait()


def checkout(folder: Path) -> str:
    """What stands in a checkout."""
    for name in ("models", "tests"):
        (folder / name).symlink_to(ROOT / name)
    (folder / ".venv").symlink_to(sys.prefix)
    return ""


def camera(folder: Path) -> str:
    """A daemon with a model that takes pictures and finds nothing, a picture and a video."""
    tiny.blank_bundle(folder / "ppocr-v4")
    (folder / "picture.jpg").write_bytes(tiny.jpeg(64, 48))
    writer = cv2.VideoWriter(str(folder / "walk.avi"), cv2.VideoWriter_fourcc(*"MJPG"), 25.0, (64, 48))
    for grey in range(20):
        writer.write(np.full((48, 64, 3), 9 * grey, np.uint8))
    writer.release()
    return "appliance run --bundle ppocr-v4"


def protocol(folder: Path) -> str:
    """The same with a bare model beside it."""
    checkout(folder)
    tiny.fours_model(folder / "mymodel.onnx")
    return f"{camera(folder)} --onnx mymodel=mymodel.onnx"


def somebodys_model(folder: Path) -> str:
    """A classifier and pictures."""
    own.classifier(folder / "model.onnx")
    own.coloured_folder(folder / "pictures", 40)
    return ""


def published(folder: Path) -> str:
    """A bundle."""
    tiny.blank_bundle(folder / "ppocr-v4")
    return ""


PREPARED: dict[str, Callable[[Path], str]] = {
    "quickstart-pc.md": checkout,
    "cameras.md": camera,
    "http.md": protocol,
    "own-model.md": somebodys_model,
    "updates.md": published,
}
"""Document -> what lays out what its reader has, and says what serves already, if anything does."""


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    made = Reader(tmp_path)
    yield made
    made.close()


def _documents_that_run() -> Iterator[object]:
    for document in DOCUMENTS:
        words = {word for block in blocks(document) for word in block.words}
        if blocks(document):
            yield pytest.param(document, id=document.name, marks=[pytest.mark.long] if "long" in words else [])


@pytest.mark.skipif(not shutil.which("curl"), reason="condition curl: it is not installed")
@pytest.mark.timeout(WITHIN_S + 100)
@pytest.mark.parametrize("document", list(_documents_that_run()))
def test_every_block_that_is_marked_does_what_it_says(document: Path, reader: Reader) -> None:
    assert {word for block in blocks(document) for word in block.words} <= {"long", "serves"}
    serves = PREPARED.get(document.name, lambda _folder: "")(reader.folder)
    if serves:
        reader.serve(serves)
    for block in blocks(document):
        reader.run(block)


def test_the_readme_builds_and_serves_as_the_quickstart_that_is_run() -> None:
    said = (ROOT / "README.md").read_text(encoding="utf-8").partition("## A bundle")[2].partition("## ")[0]
    commands = [
        row for block in re.findall(r"^```sh\n(.*?)^```$", said, re.MULTILINE | re.DOTALL) for row in block.splitlines()
    ]
    run = [row for block in blocks(ROOT / "docs" / "quickstart-pc.md") for row in block.text.splitlines()]
    assert len(commands) > 5
    assert [row for row in commands if row not in run] == []


def test_the_documents_that_begin_things_have_blocks_that_run() -> None:
    run = {document.name for document in DOCUMENTS if blocks(document)}
    assert {"quickstart-pc.md", "own-model.md", "cameras.md", "http.md", "security.md"} <= run


@pytest.mark.parametrize("block", ["false\ntrue", "echo $NOTHING", "curl http://127.0.0.1:8080/nothing"])
def test_a_block_that_fails_would_be_seen(reader: Reader, block: str) -> None:
    with pytest.raises(AssertionError):
        reader.run(Block(block, ()))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_leads_to_a_file_and_a_heading_that_are_there(document: Path) -> None:
    dead = []
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        name, _, heading = target.partition("#")
        file = document.parent / name if name else document
        if not file.exists() or (heading and heading not in headings(file)):
            dead.append(target)
    assert dead == []


def headings(document: Path) -> set[str]:
    """Headings, spelled as links to them are."""
    found = re.findall(r"^#+ (.+)$", document.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


def test_what_troubleshooting_quotes_is_what_the_code_says() -> None:
    code = "".join(
        file.read_text(encoding="utf-8")
        for package in ("models", "appliance", "provisioning")
        for file in (ROOT / package).rglob("*.py")
    )
    code = re.sub(r'"\s*\n\s*f?"', "", code)  # a sentence may go over several rows
    quoted = re.findall(r"^\| (?:[\d, ]+\| )?`([^`]+)`(?: \.\.\. `([^`]+)`)?", TROUBLES, re.MULTILINE)
    sentences = [sentence for both in quoted for sentence in both if sentence]
    assert len(sentences) > 20
    assert [sentence for sentence in sentences if sentence not in code] == []


TROUBLES = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["configuration", "architecture"])
def test_what_is_made_from_the_code_is_made_anew(name: str) -> None:
    made = runpy.run_path(str(ROOT / "docs" / "generate.py"))[name]()
    assert (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") == made, "run `python docs/generate.py`"
