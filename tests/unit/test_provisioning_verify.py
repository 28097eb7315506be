"""Verification of a bundle over any folder in the labelled format, and the report of it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt
import pytest
from support import checkpoint
from support.workshop import Workshop

from appliance.runtime import choose
from models.bundle import Check
from models.folder import BundleFolder
from provisioning.data import load
from provisioning.pack import pack
from provisioning.report import Report
from provisioning.verify import Verified, verify

pytestmark = pytest.mark.unit

PICTURE = np.random.default_rng(7).integers(0, 255, (20, 70, 3), np.uint8)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BundleFolder]:
    workshop = Workshop(tmp_path_factory.mktemp("workshop"))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(workshop.folder / "packages"))
        pack(workshop.build(), Path(workshop.out))
        yield BundleFolder(Path(workshop.out))


def verified(bundle: BundleFolder, folder: Path, split: str = "gate", precision: str = "int8") -> Verified:
    return verify(bundle, load(folder, split), precision, choose("onnxruntime-cpu"), 1, lambda _: None)


def encoded(kind: str, picture: npt.NDArray[Any] = PICTURE) -> bytes:
    return bytes(cv2.imencode(kind, picture)[1].tobytes())


def folder_of(path: Path, lines: dict[str, tuple[bytes, str]]) -> Path:
    """A folder with these lines: file -> picture and text, and nothing else."""
    (path / "lines").mkdir(parents=True)
    for file, (picture, _) in lines.items():
        (path / "lines" / file).parent.mkdir(exist_ok=True)
        (path / "lines" / file).write_bytes(picture)
    rows = "".join(f"{file}\t{text}\n" for file, (_, text) in lines.items())
    (path / "lines" / "labels.tsv").write_bytes(rows.encode())
    return path


def with_pages(path: Path, pages: list[dict[str, Any]]) -> Path:
    (path / "pages").mkdir(parents=True)
    for page in pages:
        (path / "pages" / page["file"]).write_bytes(encoded(".jpg"))
    (path / "pages" / "labels.jsonl").write_text("".join(json.dumps(page) + "\n" for page in pages))
    return path


def test_every_promised_key_is_there_with_shares_between_0_and_1(bundle: BundleFolder, tmp_path: Path) -> None:
    folder = checkpoint.labelled(tmp_path / "data", {"calibrate": 1, "gate": 5})
    result = verified(bundle, folder).result
    for what in ("original", "packed"):
        assert result[what].keys() == {"exact", "cer", "lines"}
        assert result[what]["lines"] == 5
        assert 0 <= result[what]["exact"] <= 1
    assert 0 <= result["agreement"] <= 1
    for low, high in result["interval"].values():
        assert low <= high
    assert result["by_source"].keys() == {"gate"}
    assert result["data"]["left_out"] == 1
    assert result["latency_ms"]["rec"].keys() == result["size_bytes"]["rec"].keys() == {"original", "fp32", "int8"}
    assert [one["name"] for one in result["limits"]] == ["exact_drop"]
    json.dumps(result, allow_nan=False)


def test_any_picture_name_and_text_of_the_format_is_taken(bundle: BundleFolder, tmp_path: Path) -> None:
    grey, deep = cv2.cvtColor(PICTURE, cv2.COLOR_BGR2GRAY), PICTURE.astype(np.uint16) * 257
    see_through = np.dstack([PICTURE, np.full(PICTURE.shape[:2], 99, np.uint8)])
    folder = folder_of(
        tmp_path / "data",
        {
            "photo.png": (encoded(".png"), "plain"),
            "scan_1.jpg": (encoded(".jpg"), "a JPEG"),
            "scan_2.png": (encoded(".png", grey), "grey"),
            "scan_3.png": (encoded(".png", deep), "16 bit"),
            "scan_4.png": (encoded(".png", see_through), "transparent"),
            "scan_5.png": (encoded(".png", PICTURE[:1, :1]), "."),
            "<b>_6.png": (encoded(".png"), "名前 ﬁ é \u2028 \U0001f600"),
            "größe_7.png": (encoded(".png"), ""),
            "deep/lprnet_8.png": (encoded(".png", np.hstack([PICTURE] * 60)), "京A·12345"),
            "_9.png": (encoded(".png"), "no source before the line"),
        },
    )
    found = verified(bundle, folder)
    sources = found.result["by_source"]
    assert {name: one["packed"]["lines"] for name, one in sources.items()} == {
        "<b>": 1, "größe": 1, "lprnet": 1, "other": 2, "scan": 5,
    }  # fmt: skip
    assert sources["größe"]["packed"]["cer"] >= 0
    assert "&lt;b&gt;" in found.report.to_html()
    assert "<b>" not in found.report.to_html()


def test_the_source_is_the_first_part_of_the_origin_where_one_is_noted(bundle: BundleFolder, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "data", {f"{i}.png": (encoded(".png"), "x") for i in range(3)})
    (folder / "lines" / "sources.tsv").write_text("0.png\tshop/a\n1.png\tstreet/b/c\n2.png\tnothing\n")
    assert set(verified(bundle, folder).result["by_source"]) == {"shop", "street", "other"}


def test_labels_without_a_single_character_are_no_fault(bundle: BundleFolder, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "data", {"a_1.png": (encoded(".png"), ""), "a_2.png": (encoded(".png"), " ")})
    result = verified(bundle, folder).result
    assert result["packed"]["lines"] == 2
    assert result["packed"]["cer"] >= 0
    json.dumps(result, allow_nan=False)


def test_a_folder_with_pages_alone_has_no_lines_to_report(bundle: BundleFolder, tmp_path: Path) -> None:
    pages = [{"file": "p.jpg", "source": "shop/1", "lines": [{"text": "abc", "box": [0] * 8, "ignore": False}]}]
    found = verified(bundle, with_pages(tmp_path / "data", pages))
    assert found.result["packed"] == {"exact": None, "cer": None, "lines": 0}
    assert found.result["by_source"] == {}
    assert found.result["pages"] is None  # a bundle that reads single lines reads no pages
    assert found.report.to_html()


def test_a_byte_order_mark_and_windows_line_ends_are_read_past(bundle: BundleFolder, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "data", {"a_1.png": (encoded(".png"), "abc"), "a_2.png": (encoded(".png"), "d")})
    labels = folder / "lines" / "labels.tsv"
    labels.write_bytes(b"\xef\xbb\xbf" + labels.read_bytes().replace(b"\n", b"\r\n") + b"\r\n")
    assert verified(bundle, folder).result["packed"]["lines"] == 2


class Outside(HTMLParser):
    """Collects what a page would fetch, and the tags it uses."""

    def __init__(self) -> None:
        """Nothing seen yet."""
        super().__init__()
        self.tags: list[str] = []
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.fetched += [str(value) for name, value in attrs if name in {"src", "href", "srcset", "data", "action"}]


def test_the_report_is_one_file_with_plots_that_fetches_nothing(bundle: BundleFolder, tmp_path: Path) -> None:
    page = verified(bundle, checkpoint.labelled(tmp_path / "data", {"gate": 6})).report.to_html()
    seen = Outside()
    seen.feed(page)
    assert seen.fetched == []
    assert not {"script", "link", "img", "iframe"} & set(seen.tags)
    assert not re.search(r"//|url\(|@import", page)
    assert "prefers-color-scheme: dark" in page
    assert seen.tags.count("svg") == 5  # exact, CER, by source, latency, bytes


def shown(check: Check, **parts: Any) -> str:  # noqa: ANN401 - fields of Report
    empty: dict[str, Any] = {"facts": {}, "lines": {}, "pages": {}, "latency_ms": {}, "size_bytes": {}}
    return Report(title="x", checks=[("rec int8", check)], **empty | parts).to_html()


@pytest.mark.parametrize(
    ("check", "said"),
    [
        (Check("exact_drop", 0.01, 0.0, True, "9 lines", (0.0, 0.0), resolved=False), "not resolved by</span> 9 lines"),
        (Check("exact_drop", 0.01, 0.02, False, "999 lines", (0.01, 0.03)), "missed"),
        (Check("exact_drop", 0.01, 0.0, True, "999 lines", (0.0, 0.0)), ">met<"),
    ],
)
def test_the_report_says_how_each_limit_fared(check: Check, said: str) -> None:
    assert said in shown(check)


def test_a_report_names_what_was_left_out_and_why() -> None:
    page = shown(Check("cer_drop", 0.01, 0.02, False, "9 lines"), left_out={"rec int8": "it reads < badly"})
    assert "it reads &lt; badly" in page


@pytest.mark.parametrize("count", [1, 45])
def test_a_plot_shows_at_most_twenty_sources_and_the_table_all(
    bundle: BundleFolder, tmp_path: Path, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("provisioning.verify._RUNS", 1)
    folder = folder_of(tmp_path / "data", {f"s{i}_1.png": (encoded(".png"), "x") for i in range(count)})
    page = verified(bundle, folder).report.to_html()
    assert all(f"<td>s{i}</td>" in page for i in range(count))
    assert len(re.findall(r"<text x=0 y=\S+>s\d+ \(1\)", page)) == min(count, 20)


@pytest.mark.parametrize(
    ("pages", "texts"),
    [
        ([{"file": "a.jpg", "lines": [{"text": "###"}, {"text": "x", "ignore": True}, {"text": None}]}], ("",)),
        ([{"file": "a.jpg", "source": "s/1", "lines": [{"text": "AB", "ignore": False}, {"text": "C"}]}], ("AB", "C")),
        ([{"file": "a.jpg"}], ()),
        ([{"file": "a.jpg", "lines": None}], ()),
    ],
)
def test_what_nobody_can_read_on_a_page_is_not_asked_for(
    tmp_path: Path, pages: list[dict[str, Any]], texts: tuple[str, ...]
) -> None:
    (page,) = load(with_pages(tmp_path / "data", pages), "gate").pages
    assert page.texts == texts


def test_what_a_build_may_have_seen_is_not_scored(tmp_path: Path) -> None:
    project = checkpoint.labelled(tmp_path / "project", {"calibrate": 2, "gate": 3})
    other = folder_of(tmp_path / "other", {f"a_{i}.png": (encoded(".png"), "x") for i in range(4)})
    rows = "a_0.png\tcalibrate/1\na_1.png\tgate/1\na_2.png\telsewhere/9\n"
    (other / "lines" / "sources.tsv").write_text(rows)

    def scored(split: str) -> list[str]:
        return [line.file for line in load(other, split, None, project).lines]

    assert scored("gate") == ["a_1.png", "a_2.png", "a_3.png"]
    assert len(scored("all")) == 4
    assert load(other, "gate", None, project).left_out == 1
