"""Somebody's own classifier and detector, real ones from public wheels: recipe, INT8, served, asked."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import cv2
import numpy as np
import pytest
from support import own
from support.daemon import Daemon, StartDaemon, appliance
from support.workshop import Workshop

from models.folder import BundleFolder

pytestmark = pytest.mark.journey

OCR = Path(__file__).parent.parent / "data" / "ocr"


def checkpoint(package: str, version: str, file: str) -> Path:
    """A file of an installed package; skips the test where that is not installed."""
    try:
        found = metadata.distribution(package)
    except metadata.PackageNotFoundError:
        pytest.skip(f"condition {package}: pip install --no-deps {package}=={version}")
    return Path(str(found.locate_file(file)))


def change(recipe: Path, **rows: str) -> None:
    """Give rows of a recipe other values, by their keys."""
    lines = recipe.read_text().splitlines()
    for key, value in rows.items():
        (at,) = (i for i, line in enumerate(lines) if line.startswith(f"{key} = "))
        lines[at] = f"{key} = {value}"
    recipe.write_text("\n".join(lines))


@pytest.fixture
def bench(tmp_path: Path) -> Workshop:
    """The command `provision` in a folder of its own."""
    return Workshop(tmp_path)


Serve = Callable[[Path], Daemon]


@pytest.fixture
def serve(start_daemon: StartDaemon) -> Serve:
    """Starts a daemon with a bundle in INT8."""
    return lambda bundle: start_daemon("--bundle", str(bundle), "--precision", "int8").wait_serving().wait_ready()


def test_labels_that_cannot_be_read_are_named(bench: Workshop) -> None:
    assert "labels.txt cannot be read" in bench.failed("new", "--from", "model.onnx", "--labels", "labels.txt")


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_real_classifier_tells_upright_lines_from_lines_upside_down_in_int8(
    bench: Workshop, tmp_path: Path, serve: Serve
) -> None:
    file = "rapidocr_onnxruntime/models/ch_ppocr_mobile_v2.0_cls_infer.onnx"
    shutil.copy(checkpoint("rapidocr-onnxruntime", "1.4.4", file), tmp_path / "way.onnx")
    (tmp_path / "labels.txt").write_text("upright\nupside down\n")
    lines = [path for path in sorted((OCR / "lines").rglob("*")) if path.suffix in {".png", ".jpg"}][:128]
    for number, path in enumerate(lines):
        picture = cv2.imread(str(path))
        own.save(tmp_path / "pictures" / f"{number}.png", picture if number % 4 < 2 else np.rot90(picture, 2))
    told = bench.provision("new", "--from", "way.onnx", "--labels", "labels.txt")
    assert "likely task: classification" in told.stdout, told.stderr
    assert "check colours: the order that the model was trained with" in told.stdout
    # INT8 costs this one a line or two in a hundred (docs/quantization.md): here 2 of 64, more than the usual limit.
    change(
        tmp_path / "way.toml", **{"gate.same_class": "0.9"}, width="192", height="48", shape="[-1, 3, 48, 192]",
        fit='"stretch"', colours='"bgr"', mean="[0.5]", deviation="[0.5]",
    )  # fmt: skip
    built = bench.provision("build", "way.toml", "--out", "served")
    assert built.returncode == 0, built.stderr
    assert "unlabelled" in built.stdout
    assert "unlabelled" in (tmp_path / "served" / "report.html").read_text()
    variant = BundleFolder(tmp_path / "served").manifest.graphs["cls"].variants["int8"]
    assert variant.agreement is not None
    assert variant.agreement.share >= 0.9
    daemon = serve(tmp_path / "served")
    right = 0
    for number in range(len(lines)):
        content = (tmp_path / "pictures" / f"{number}.png").read_bytes()
        answer = daemon.http.post("/v1/models/way/predict", content=content).raise_for_status().json()
        right += answer["classes"][0]["label"] == ("upright" if number % 4 < 2 else "upside down")
    assert right / len(lines) > 0.75  # the float model: 110 of 128
    shown = appliance("infer", "way", str(tmp_path / "pictures" / f"{number}.png"), "--url", daemon.url)
    head, first, *_ = shown.stdout.splitlines()
    assert head.split() == ["class", "confidence", "at"]
    assert answer["classes"][0]["label"] in first
    assert "cls int8" in shown.stdout


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_real_detector_finds_in_int8_what_it_finds_in_float(bench: Workshop, tmp_path: Path, serve: Serve) -> None:
    shutil.copy(checkpoint("ddddocr", "1.6.1", "ddddocr/common_det.onnx"), tmp_path / "find.onnx")
    for number in range(16):
        own.save(tmp_path / "pictures" / f"{number}.png", captcha(number))
    told = bench.provision("new", "--from", "find.onnx", "--json")
    found = json.loads(told.stdout)
    assert (found["task"], found["settings"]["head"], found["shape"]) == ("detection", "yolox", [1, 3, 416, 416])
    # Without the search for what stays in float, so that this test is quick: here nothing has to.
    change(tmp_path / "find.toml", count="8\n[graphs.det.int8]\nkeep_float = []")
    built = bench.provision("build", "find.toml", "--out", "served")
    assert built.returncode == 0, built.stderr
    (check,) = BundleFolder(tmp_path / "served").manifest.graphs["det"].variants["fp32"].checks
    assert (check.name, check.measured) == ("matched", 1.0)
    daemon = serve(tmp_path / "served")
    picture = own.save(tmp_path / "x.png", captcha(99))
    answer = daemon.http.post("/v1/models/find/predict", content=picture.read_bytes()).raise_for_status().json()
    middles = sorted(np.mean(one["box"], axis=0)[0] for one in answer["objects"])
    assert len(middles) >= 3
    assert all(min(abs(middle - letter) for letter in (55, 135, 215, 295)) < 15 for middle in middles)
    shown = appliance("infer", "find", str(picture), "--url", daemon.url)
    assert shown.stdout.split()[:3] == ["object", "confidence", "at"]


def captcha(seed: int) -> own.Picture:
    """Four letters on a noisy ground, 360 x 160."""
    random = np.random.default_rng(seed)
    picture = random.integers(225, 246, (160, 360, 3)).astype(np.uint8)
    for place, letter in enumerate(random.choice(list("ABCDEFHKMNPRTXY"), 4)):
        colour = tuple(int(value) for value in random.integers(0, 120, 3))
        cv2.putText(picture, str(letter), (35 + 80 * place, 105), cv2.FONT_HERSHEY_DUPLEX, 1.6, colour, 5, cv2.LINE_AA)
    return picture
